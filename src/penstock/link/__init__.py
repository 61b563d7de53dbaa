"""Connections between processes of the replicas' side: framed messages, and proof that both ends know one secret."""
