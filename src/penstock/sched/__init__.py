"""The scheduler: sequences, queues and plans; token counts and block ids. It has never seen a tensor or a socket."""
