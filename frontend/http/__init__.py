"""The HTTP interface, from the outside in: `server`, `app`, a file per API, formats, store."""
