"""What parts an answer: `events` that a text becomes, `reader` from which parsers read it as it comes, and how calls
are written: as JSON, in tags, as Python."""
