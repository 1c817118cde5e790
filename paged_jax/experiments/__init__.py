"""Experiments from one YAML file: settings, workloads, trials, metrics, tables and figures."""
