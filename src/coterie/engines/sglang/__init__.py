"""SGLang through its HTTP endpoints: SGLang is not imported and may run on another machine."""
