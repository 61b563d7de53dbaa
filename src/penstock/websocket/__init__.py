"""WebSockets (RFC 6455) in front of an application that answers HTTP exchanges: one socket, several requests.

`frames` is the codec, `handshake` the way in, `socket` one connection. A `Session` turns messages into exchanges inside
the process, which the gateway or the replica answers like any other; `chat` and `responses` are what clients speak.
Nothing here knows what answers.
"""
