"""Long work in units: run anywhere, journaled so that an interrupted run goes on, and told of as it goes."""
