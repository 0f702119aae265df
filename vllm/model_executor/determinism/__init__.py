"""Results that do not depend on the batch."""
