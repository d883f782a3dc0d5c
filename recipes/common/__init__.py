"""What recipes share: toys to learn, small likenesses of large runs, answers that are right as mathematics."""
