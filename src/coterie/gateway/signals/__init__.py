"""What a router must know of a request and cannot see in it: token ids, cached prefixes, expected experts."""
