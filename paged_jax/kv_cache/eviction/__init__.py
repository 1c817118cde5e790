"""Which cached block is given up first: policies, one file each."""
