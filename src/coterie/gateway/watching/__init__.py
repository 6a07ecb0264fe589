"""What the gateway says of itself: metrics, last decisions, spans, log lines."""
