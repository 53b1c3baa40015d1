"""Runs DAGs, one after the other: their names and configurations come line by line."""

import json
import sys

from tests.airflow.dags import examples

ALL = {dag.dag_id: dag for dag in vars(examples).values() if isinstance(dag, examples.DAG)}

for line in sys.stdin:
    name, conf = json.loads(line)
    run = ALL[name].test(run_conf=conf)
    instances = run.get_task_instances()
    states = {f"{one.task_id}[{one.map_index}]": str(one.state) for one in instances}
    returned = {
        f"{one.task_id}[{one.map_index}]": one.xcom_pull(one.task_id, map_indexes=one.map_index)
        for one in instances
    }
    answer = {"run_id": run.run_id, "states": states, "returned": returned}
    print("RESULT " + json.dumps(answer, default=str), flush=True)
