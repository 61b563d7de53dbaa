"""How weights get small: from the weights a checkpoint has to those a device reads faster. Knows formats, no models."""
