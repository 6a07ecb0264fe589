"""Questions put to a live gateway: routers compared on the same requests, and what that says in a sentence."""
