"""The type checker that pytest puts on every annotated function: beartype, with PEP 484's rule that an int is a float."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
