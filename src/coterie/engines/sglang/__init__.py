"""SGLang, over its HTTP endpoints: nothing here imports it, and it need not run on this machine."""
