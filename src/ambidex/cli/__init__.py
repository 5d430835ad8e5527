"""The command line `ambidex`: verbs, their settings and what they show. The only place that reads the environment."""
