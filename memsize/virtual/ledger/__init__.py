"""The ledger of a simulated GPU: which ops run on it, what they store there, and what streams and threads wait for."""
