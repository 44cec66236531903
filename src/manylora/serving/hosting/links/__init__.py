"""Links between the API process and engines, and the requests that travel over them."""
