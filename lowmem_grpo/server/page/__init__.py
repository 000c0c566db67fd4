"""The live page over HTTP: sign-in, the content of the page, and the actions of its buttons."""
