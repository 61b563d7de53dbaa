"""`penstock top`: the console in a terminal. It reads the feed that the page reads, of a gateway or of one replica."""
