"""One request through the fleet: choose workers, send it, pass the answer on. No HTTP from clients is parsed here."""
