"""What single pages read, over the desk that all of them share."""
