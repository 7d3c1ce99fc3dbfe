"""What a user runs to see and decide: tasks on real data, the demo, the doctor."""
