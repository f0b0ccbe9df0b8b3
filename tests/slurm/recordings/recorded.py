"""What a real Slurm 22.05.8 printed: tests/on_slurm on Debian 12, four nodes with accounting, on 2026-11-21.

The commands ran with TZ=UTC and SLURM_TIME_FORMAT=standard, as SlurmClient runs them. Nothing is edited.
"""

# squeue --noheader --states=all --Format=QUEUE_FORMAT
SQUEUE = (
    "6\x1fCANCELLED\x1fNone\x1fzslurm-test\x1fnode0\x1f1\x1f0\x1f15\x1f2026-11-21T14:23:28\x1f"
    "2026-11-21T14:23:29\x1f2026-11-21T14:23:31\x1f10:00\x1fbatch\x1fcancelled\x1f(null)\x1f"
    "/tmp/zslurm-cluster-5ul83luw/user/home\x1e\n"
    "1\x1fCOMPLETED\x1fNone\x1fzslurm-test\x1fnode0\x1f1\x1f0\x1f0\x1f2026-11-21T14:23:28\x1f"
    "2026-11-21T14:23:29\x1f2026-11-21T14:23:29\x1f10:00\x1fbatch\x1fdone\x1f(null)\x1f"
    "/tmp/zslurm-cluster-5ul83luw/user/home\x1e\n"
    "2\x1fFAILED\x1fNonZeroExitCode\x1fzslurm-test\x1fnode0\x1f1\x1f0\x1f768\x1f2026-11-21T14:23:28\x1f"
    "2026-11-21T14:23:29\x1f2026-11-21T14:23:29\x1f10:00\x1fbatch\x1f"
    'we|ird, "na me" JobState=RUNNING\x1ftwo\n'
    "lines | here\x1f/tmp/zslurm-cluster-5ul83luw/user/home\x1e\n"
    "3\x1fFAILED\x1fJobLaunchFailure\x1fzslurm-test\x1fnode0\x1f1\x1f0\x1f9\x1f2026-11-21T14:23:28\x1f"
    "2026-11-21T14:23:29\x1f2026-11-21T14:23:29\x1f10:00\x1fbatch\x1fsbatch\x1f(null)\x1f"
    "/tmp/zslurm-cluster-5ul83luw/user/home\x1e\n"
    "7\x1fPENDING\x1fBeginTime\x1fzslurm-test\x1f\x1f1\x1f1\x1f0\x1f2026-11-21T14:23:31\x1f2026-11-21T14:25:32\x1f"
    "2026-11-21T14:35:32\x1f10:00\x1fbatch\x1frequeued\x1f(null)\x1f"
    "/tmp/zslurm-cluster-5ul83luw/user/home\x1e\n"
    "8\x1fPENDING\x1fjob requeued in held state\x1fzslurm-test\x1f\x1f1\x1f1\x1f0\x1f2026-11-21T14:23:31\x1f"
    "2026-11-21T14:25:32\x1f2026-11-21T14:35:32\x1f10:00\x1fbatch\x1frequeue-held\x1f(null)\x1f"
    "/tmp/zslurm-cluster-5ul83luw/user/home\x1e\n"
    "9_[0-3]\x1fPENDING\x1fJobHeldUser\x1fzslurm-test\x1f\x1f1\x1f0\x1f0\x1f2026-11-21T14:23:31\x1fN/A\x1fN/A\x1f"
    "10:00\x1fbatch\x1fsbatch\x1f(null)\x1f/tmp/zslurm-cluster-5ul83luw/user/home\x1e\n"
    "5\x1fPENDING\x1fJobHeldUser\x1fzslurm-test\x1f\x1f1\x1f0\x1f0\x1f2026-11-21T14:23:28\x1fN/A\x1fN/A\x1f10:00\x1f"
    "batch\x1fsbatch\x1f(null)\x1f/tmp/zslurm-cluster-5ul83luw/user/home\x1e\n"
    "4\x1fRUNNING\x1fNone\x1fzslurm-test\x1fnode[0-1]\x1f2\x1f0\x1f0\x1f2026-11-21T14:23:28\x1f"
    "2026-11-21T14:23:29\x1f2026-11-22T10:26:29\x1f20:03:00\x1fbatch\x1frunning\x1f(null)\x1f"
    "/tmp/zslurm-cluster-5ul83luw/user/home\x1e\n"
)

# sacct -X -D --allusers --noheader --parsable2 --delimiter=FIELD_END --format=HISTORY_FORMAT
SACCT = (
    "1\x1fCOMPLETED\x1fNone\x1fzslurm-test\x1fnode0\x1f1\x1f0:0\x1f2026-11-21T14:23:28\x1f"
    "2026-11-21T14:23:29\x1f2026-11-21T14:23:29\x1f00:10:00\x1fbatch\x1fdone\x1f\x1f"
    "/tmp/zslurm-cluster-5ul83luw/user/home\n"
    "2\x1fFAILED\x1fNone\x1fzslurm-test\x1fnode0\x1f1\x1f3:0\x1f2026-11-21T14:23:28\x1f2026-11-21T14:23:29\x1f"
    "2026-11-21T14:23:29\x1f00:10:00\x1fbatch\x1fwe|ird, `na me` JobState=RUNNING\x1ftwo\n"
    "lines | here\x1f/tmp/zslurm-cluster-5ul83luw/user/home\n"
    "3\x1fFAILED\x1fNone\x1fzslurm-test\x1fnode0\x1f1\x1f0:9\x1f2026-11-21T14:23:28\x1f2026-11-21T14:23:29\x1f"
    "2026-11-21T14:23:29\x1f00:10:00\x1fbatch\x1fsbatch\x1f\x1f/tmp/zslurm-cluster-5ul83luw/user/home\n"
    "4\x1fRUNNING\x1fNone\x1fzslurm-test\x1fnode[0-1]\x1f2\x1f0:0\x1f2026-11-21T14:23:28\x1f"
    "2026-11-21T14:23:29\x1fUnknown\x1f20:03:00\x1fbatch\x1frunning\x1f\x1f"
    "/tmp/zslurm-cluster-5ul83luw/user/home\n"
    "6\x1fCANCELLED by 1001\x1fNone\x1fzslurm-test\x1fnode0\x1f1\x1f0:0\x1f2026-11-21T14:23:28\x1f"
    "2026-11-21T14:23:29\x1f2026-11-21T14:23:31\x1f00:10:00\x1fbatch\x1fcancelled\x1f\x1f"
    "/tmp/zslurm-cluster-5ul83luw/user/home\n"
    "7\x1fREQUEUED\x1fNone\x1fzslurm-test\x1fnode0\x1f1\x1f0:0\x1f2026-11-21T14:23:28\x1f2026-11-21T14:23:29\x1f"
    "2026-11-21T14:23:31\x1f00:10:00\x1fbatch\x1frequeued\x1f\x1f/tmp/zslurm-cluster-5ul83luw/user/home\n"
    "8\x1fREQUEUED\x1fNone\x1fzslurm-test\x1fnode0\x1f1\x1f0:0\x1f2026-11-21T14:23:28\x1f2026-11-21T14:23:29\x1f"
    "2026-11-21T14:23:31\x1f00:10:00\x1fbatch\x1frequeue-held\x1f\x1f"
    "/tmp/zslurm-cluster-5ul83luw/user/home\n"
)

# sinfo --Node --noheader --Format=NODE_FORMAT; node2 was killed, node3 drained
SINFO = (
    "node0\x1fmixed\x1fgpu:mi300x:8\x1f32\x1f20000\x1fbatch\x1fnone\x1e\n"
    "node1\x1fmixed\x1fgpu:mi300x:8\x1f32\x1f20000\x1fbatch\x1fnone\x1e\n"
    "node2\x1fdown\x1fgpu:mi300x:8\x1f32\x1f20000\x1fbatch\x1fkilled\x1e\n"
    "node3\x1fidle+drain\x1fgpu:mi300x:8\x1f32\x1f20000\x1fbatch\x1fbad GPU, see ticket 7\x1e\n"
)

# scontrol --oneliner show partition
PARTITION = (
    "PartitionName=batch AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES "
    "QoS=N/A DefaultTime=00:10:00 DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO "
    "MaxNodes=UNLIMITED MaxTime=1-00:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED "
    "Nodes=node[0-3] PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO "
    "OverTimeLimit=NONE PreemptMode=OFF State=UP TotalCPUs=128 TotalNodes=4 "
    "SelectTypeParameters=NONE JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED "
    "TRES=cpu=128,mem=80000M,node=4,billing=128,gres/gpu=32\n"
)

# scontrol show config, its first lines
CONFIG = (
    "Configuration data as of 2026-11-21T14:23:40\n"
    "AccountingStorageBackupHost = (null)\n"
    "AccountingStorageEnforce = none\n"
    "AccountingStorageHost   = 127.0.0.1\n"
    "AccountingStorageExternalHost = (null)\n"
    "AccountingStorageParameters = (null)\n"
    "AccountingStoragePort   = 23340\n"
    "AccountingStorageTRES   = cpu,mem,energy,node,billing,fs/disk,vmem,pages,gres/gpu\n"
    "AccountingStorageType   = accounting_storage/slurmdbd\n"
    "AccountingStorageUser   = N/A\n"
    "AccountingStoreFlags    = job_comment\n"
    "AcctGatherEnergyType    = acct_gather_energy/none\n"
    "AcctGatherFilesystemType = acct_gather_filesystem/none\n"
    "AcctGatherInterconnectType = acct_gather_interconnect/none\n"
    "AcctGatherNodeFreq      = 0 sec\n"
    "AcctGatherProfileType   = acct_gather_profile/none\n"
    "AllowSpecResourcesUsage = No\n"
    "AuthAltTypes            = (null)\n"
    "AuthAltParameters       = (null)\n"
    "AuthInfo                = socket=/tmp/zslurm-cluster-5ul83luw/munge/socket\n"
    "AuthType                = auth/munge\n"
    "BatchStartTimeout       = 10 sec\n"
    "BcastExclude            = /lib,/usr/lib,/lib64,/usr/lib64\n"
    "BcastParameters         = (null)\n"
    "BOOT_TIME               = 2026-11-21T14:23:26\n"
    "BurstBufferType         = (null)\n"
    "CliFilterPlugins        = (null)\n"
    "ClusterName             = z5ul83luw\n"
)

# scontrol show topology: eight nodes with topology/tree; 2026-11-22
TOPOLOGY = (
    "SwitchName=leaf0 Level=0 LinkSpeed=1 Nodes=node[0,2,4,6]\n"
    "SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=node[1,3,5,7]\n"
    "SwitchName=spine Level=1 LinkSpeed=1 Nodes=node[0-7] Switches=leaf0,leaf1\n"
)
# and without a topology, exit code 0; on stderr `scontrol: error: No topology information available`
NO_TOPOLOGY = ""

# squeue --jobs=999, exit code 1
UNKNOWN_JOB = "slurm_load_jobs error: Invalid job id specified\n"

# scancel --verbose 999, exit code 0
SCANCEL_UNKNOWN = (
    "scancel: Terminating job 999\nscancel: error: Kill job error on job id 999: Invalid job id specified\n"
)

# scontrol requeue 999, exit code 1
REQUEUE_UNKNOWN = "Invalid job id specified for job 999\n"

# squeue with slurmctld stopped, exit code 1
CONTROLLER_DOWN = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"

# scontrol requeue 1 with slurmctld stopped, exit code 1
CONTROLLER_DOWN_REQUEUE = "Unexpected message received for job 1\n"

# env in a batch script: sbatch -N2 --gpus-per-node=2 --ntasks-per-node=2 -c3 --mem=5G --gpu-bind=none
# --distribution=block -J stepy (two nodes, no accounting)
BATCH_ENVIRONMENT = """\
SLURMD_NODENAME=node0
SLURM_CLUSTER_NAME=zby3uo9r_
SLURM_CONF=/tmp/zslurm-cluster-by3uo9r_/etc/slurm.conf
SLURM_CPUS_ON_NODE=6
SLURM_CPUS_PER_TASK=3
SLURM_DISTRIBUTION=block
SLURM_GPUS_ON_NODE=2
SLURM_GPUS_PER_NODE=2
SLURM_GPU_BIND=none
SLURM_GTIDS=0
SLURM_JOBID=1
SLURM_JOB_CPUS_PER_NODE=6(x2)
SLURM_JOB_GID=1001
SLURM_JOB_GPUS=0,1
SLURM_JOB_ID=1
SLURM_JOB_NAME=stepy
SLURM_JOB_NODELIST=node[0-1]
SLURM_JOB_NUM_NODES=2
SLURM_JOB_PARTITION=batch
SLURM_JOB_UID=1001
SLURM_JOB_USER=zslurm-test
SLURM_LOCALID=0
SLURM_MEM_PER_NODE=5120
SLURM_NNODES=2
SLURM_NODEID=0
SLURM_NODELIST=node[0-1]
SLURM_NODE_ALIASES=(null)
SLURM_NPROCS=4
SLURM_NTASKS=4
SLURM_NTASKS_PER_NODE=2
SLURM_PRIO_PROCESS=0
SLURM_PROCID=0
SLURM_SUBMIT_DIR=/tmp/zslurm-cluster-by3uo9r_/user/d
SLURM_SUBMIT_HOST=vm
SLURM_TASKS_PER_NODE=2(x2)
SLURM_TASK_PID=30217
SLURM_TOPOLOGY_ADDR=node0
SLURM_TOPOLOGY_ADDR_PATTERN=node
SLURM_WORKING_CLUSTER=zby3uo9r_:127.0.0.1:24801:9728:109
"""

# env in task 3 of `srun -N2 -n4 --ntasks-per-node=2` in that script
TASK_ENVIRONMENT = """\
SLURMD_NODENAME=node1
SLURMD_TRES_BIND=gpu:none
SLURM_CLUSTER_NAME=zby3uo9r_
SLURM_CONF=/tmp/zslurm-cluster-by3uo9r_/etc/slurm.conf
SLURM_CPUS_ON_NODE=6
SLURM_CPUS_PER_TASK=3
SLURM_DISTRIBUTION=block
SLURM_GPUS_ON_NODE=2
SLURM_GPUS_PER_NODE=2
SLURM_GPU_BIND=none
SLURM_GTIDS=2,3
SLURM_JOBID=1
SLURM_JOB_CPUS_PER_NODE=6(x2)
SLURM_JOB_CPUS_PER_NODE_PACK_GROUP_0=6(x2)
SLURM_JOB_GID=1001
SLURM_JOB_GPUS=0,1
SLURM_JOB_ID=1
SLURM_JOB_NAME=stepy
SLURM_JOB_NODELIST=node[0-1]
SLURM_JOB_NUM_NODES=2
SLURM_JOB_PARTITION=batch
SLURM_JOB_UID=1001
SLURM_JOB_USER=zslurm-test
SLURM_LAUNCH_NODE_IPADDR=127.0.0.1
SLURM_LOCALID=1
SLURM_MEM_PER_NODE=5120
SLURM_NNODES=2
SLURM_NODEID=1
SLURM_NODELIST=node[0-1]
SLURM_NODE_ALIASES=(null)
SLURM_NPROCS=4
SLURM_NTASKS=4
SLURM_NTASKS_PER_NODE=2
SLURM_PRIO_PROCESS=0
SLURM_PROCID=3
SLURM_SRUN_COMM_HOST=127.0.0.1
SLURM_SRUN_COMM_PORT=35079
SLURM_STEPID=0
SLURM_STEP_ID=0
SLURM_STEP_LAUNCHER_PORT=35079
SLURM_STEP_NODELIST=node[0-1]
SLURM_STEP_NUM_NODES=2
SLURM_STEP_NUM_TASKS=4
SLURM_STEP_TASKS_PER_NODE=2(x2)
SLURM_SUBMIT_DIR=/tmp/zslurm-cluster-by3uo9r_/user/d
SLURM_SUBMIT_HOST=vm
SLURM_TASKS_PER_NODE=2(x2)
SLURM_TASK_PID=30248
SLURM_TOPOLOGY_ADDR=node1
SLURM_TOPOLOGY_ADDR_PATTERN=node
SLURM_UMASK=0022
SLURM_WORKING_CLUSTER=zby3uo9r_:127.0.0.1:24801:9728:109
"""
