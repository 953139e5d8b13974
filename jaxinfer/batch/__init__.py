"""The JSONL batch runner: many requests in a file, one result line each, in order, resumable. Formats: docs/batch.md."""
