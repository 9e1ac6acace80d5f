"""Read one rank's part of the weights and make its layers of them."""
