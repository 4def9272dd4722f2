"""What would happen: traces replayed through the policies and placement of the store, sizes, what loading pays."""
