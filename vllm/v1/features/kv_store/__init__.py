"""A store on disk: KV blocks are written behind the steps, and found again by later processes."""
