"""Dialects of other engines: tables first, code second.

`dialect` says what a description is made of, `engines` holds one for each kind of server, and the other modules read
them: what it reports, how it fares, what it is sent and what it answers. No sockets and no clock here: bytes in, facts
out; `gateway.foreign` does the asking. A rename upstream is a change of a table.
"""
