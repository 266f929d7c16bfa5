"""What operators on several ranks share: an agreement before anything is sent."""
