"""What Slurms of other versions printed on other clusters, each with its public source.

Shortened where the source is; nothing else is edited.
"""

# Slurm 20.11.6, Ghent University: github.com/hpcugent/vsc-administration, test/slurm_scontrol.py, commit 7cf2c31c
CONFIG_20_11 = """\
Configuration data as of 2022-04-27T10:07:02
AccountingStorageBackupHost = (null)
AccountingStorageEnforce = associations
AccountingStorageHost   = mydb
AccountingStorageExternalHost = (null)
ClusterName             = mycluster
SLURM_CONF              = /etc/slurm/slurm.conf
SLURM_VERSION           = 20.11.6
TrackWCKey              = No
TreeWidth               = 50
UsePam                  = No
UnkillableStepProgram   = (null)
UnkillableStepTimeout   = 120 sec
VSizeFactor             = 0 percent
WaitTime                = 0 sec
X11Parameters           = (null)

Cgroup Support Configuration:
AllowedDevicesFile      = (null)
AllowedKmemSpace        = (null)
AllowedRAMSpace         = 100.0%
AllowedSwapSpace        = 0.0%
CgroupAutomount         = no
CgroupMountpoint        = (null)
"""
PARTITION_20_11 = (
    "PartitionName=mypart AllowGroups=gabc,wheel AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES "
    "QoS=N/A DefaultTime=01:00:00 DisableRootJobs=YES ExclusiveUser=NO GraceTime=0 Hidden=NO "
    "MaxNodes=UNLIMITED MaxTime=3-00:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED "
    "Nodes=node1,node2 PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO "
    "OverTimeLimit=NONE PreemptMode=OFF State=UP TotalCPUs=32 TotalNodes=2 SelectTypeParameters=NONE "
    "JobDefaults=(null) DefMemPerCPU=800 MaxMemPerNode=3200 TRESBillingWeights=CPU=1,Mem=1.33G\n"
)

# The GRES of nodes, Slurm 20.11.8 and 21.08.5: github.com/vpenso/prometheus-slurm-exporter,
# test_data/slurm-20.11.8/sinfo_gpus_total.txt and test_data/slurm-21.08.5/sinfo_gpus_total.txt, commit d8c9c54b
GRES_20_11, GRES_21_08 = ("(null)", "gpu:2"), ("gpu:8",)

# Likewise, of a cluster whose version is not known: github.com/rivosinc/prometheus-slurm-exporter,
# exporter/fixtures/sinfo_fallback.txt, commit 29b7c6e8
GRES_UNTOLD = ("", "gpu:a100:8")

# slurm_strerror on what squeue prints when it has to wait, since 23.02:
# github.com/SchedMD/slurm, src/common/slurm_errno.c, commit 0001e1b4
RATE_LIMITS = ("Rate limit exceeded, please retry momentarily", "Rate limit exceeded, please retry later")
CONNECTION_TIMEOUT = "Connection timed out establishing"

# The long names of squeue's fields: github.com/SchedMD/slurm, src/squeue/opts.c, commit 0360254c,
# which has the step ids that 20.11 brought
SQUEUE_FIELDS_20_11 = (
    "account jobid gres batchhost burstbuffer burstbufferstate cluster delayboot mincpus numcpus mintmpdisk "
    "numnodes numtasks endtime dependency feature clusterfeature arrayjobid groupname groupid oversubscribe "
    "shared sockets jobarrayid cores name threads admin_comment system_comment comment arraytaskid "
    "timelimit timeleft minmemory "
    "timeused reqnodes nodelist command contiguous priority partition qos prioritylong reason reasonlist "
    "selectjobinfo starttime lastschedeval statecompact state userid username reservation submittime pendingtime "
    "wckey licenses corespec nice schednodes sct workdir accruetime allocnodes allocsid associd batchflag "
    "boardspernode cpuspertask derivedec eligibletime exit_code origin originraw siblingsactive maxcpus maxnodes "
    "network ntpercore ntpernode ntpersocket ntperboard preempttime profile reboot reqswitch requeue resizetime "
    "restartcnt sperboard stderr stdin stdout mintime wait4switch"
).split()

# scontrol --oneliner show step 1, of Slurm 26.05.5 with SlurmctldParameters=enable_stepmgr
STEPS_26_05 = (
    "StepId=1.extern UserId=0 StartTime=2026-11-28T04:32:19 TimeLimit=UNLIMITED State=RUNNING Partition=batch "
    "NodeList=node[0-1] Nodes=2 CPUs=0 Tasks=2 Name=extern Network=(null) TRES=(null) ResvPorts=(null) "
    "CPUFreqReq=Default SrunHost:Pid=(null):0\n"
    "StepId=1.batch UserId=0 StartTime=2026-11-28T04:32:19 TimeLimit=UNLIMITED State=RUNNING Partition=batch "
    "NodeList=node0 Nodes=1 CPUs=0 Tasks=1 Name=batch Network=(null) TRES=(null) ResvPorts=(null) "
    "CPUFreqReq=Default SrunHost:Pid=(null):0\n"
    "StepId=1.0 UserId=0 StartTime=2026-11-28T04:32:19 TimeLimit=UNLIMITED State=RUNNING Partition=batch "
    "NodeList=node[0-1] Nodes=2 CPUs=2 Tasks=2 Name=attempt-1 Network=(null) TRES=cpu=2,mem=1000M,node=2 "
    "ResvPorts=(null) CPUFreqReq=Default Dist=Block SrunHost:Pid=vm:155\n"
    "StepId=1.1 UserId=0 StartTime=2026-11-28T04:32:19 TimeLimit=UNLIMITED State=RUNNING Partition=batch "
    "NodeList=node0 Nodes=1 CPUs=1 Tasks=1 Name=a b Network=(null) TRES=cpu=1,mem=500M,node=1 ResvPorts=(null) "
    "CPUFreqReq=Default Dist=Block SrunHost:Pid=vm:156\n"
)
