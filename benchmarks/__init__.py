"""Measurements, one script per question. They use the other packages as a user would; nothing imports them."""
