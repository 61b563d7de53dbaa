"""The configuration of a gateway.

gateway             the file, and the objects that are made of it
routes, monitor     its parts
route_board         routes with what was changed at run time
"""
