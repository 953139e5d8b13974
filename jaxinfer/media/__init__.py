"""Images in requests: fetched, decoded within limits, and made into what a model's vision tower takes. No JAX in here."""
