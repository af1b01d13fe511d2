"""Several processes that work for one: here, or on other machines by Ray. They look the same from above."""
