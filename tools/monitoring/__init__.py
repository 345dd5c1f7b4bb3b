"""The catalogue of metrics turned into dashboards, rules and the query that scales; knows no server and no cluster."""
