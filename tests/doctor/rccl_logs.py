"""Lines of RCCL's and NCCL's logs as people have published them, and what the nodes of the tests print.

Each block names its source. If a published log lacks the line `Using network`, it is added in the form that
src/init.cc prints, with the name that the transport has in its source.
"""

from __future__ import annotations

EIGHT = " ".join(f"[{index}]ionic_{index}:1/RoCE" for index in range(8))

# ROCm/rccl#2078, with RCCL_AINIC_ROCE=0: RCCL's generic transport on Pollara.
GENERIC = f"""\
gpufc55:452952:453057 [7] NCCL INFO NET/IB : Using {EIGHT} [RO]; OOB ens50f0:10.235.200.207<0>
gpufc55:452952:453057 [7] NCCL INFO Initialized NET plugin IB
gpufc55:452949:453058 [4] NCCL INFO Assigned NET plugin IB to comm
gpufc55:452949:453058 [4] NCCL INFO Using network IB
"""

# ROCm/rocm-systems, projects/rccl, src/transport/net_ib_cast (the line about AINIC); channels as logged with it.
BUILT_IN = f"""\
node0:1:2 [0] NCCL INFO NET/IB : Using {EIGHT} [RO]; OOB ens3:10.0.0.1<0>
node0:1:2 [0] NCCL INFO NET/IB : AINIC RoCEv2 optimizations enabled: CTS Inline Data: Enabled; CTS Offload: \
Enabled; IB Use Inline: enabled; GDR Flush: disabled
node0:1:2 [0] NCCL INFO Using network IB-CAST
node0:1:2 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB-CAST/0/GDRDMA/flush=Always
node0:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB-CAST/0/GDRDMA
"""

# The same without GPUDirect: every second channel through another NIC and host memory.
STAGED = BUILT_IN + (
    "node0:1:2 [1] NCCL INFO Channel 00/0 : 1[1] -> 0[1] [receive] via NET/IB-CAST/1\n"
    "node0:1:2 [1] NCCL INFO Channel 01/0 : 1[1] -> 0[1] [receive] via NET/IB-CAST/0\n"
)

# ROCm/amd-anp: src/net_ib.cc; its load as RCCL of ROCm 7 logs it.
PLUGIN = f"""\
node0:1:2 [0] /tmp/amd-anp/src/net_ib.cc:855 NCCL WARN ANP plugin loaded successfully with telemetry disabled : \
/opt/rocm/lib/librccl-anp.so
node0:1:2 [0] NCCL INFO NET/Plugin: Loaded net plugin RCCL-ANP (v10)
node0:1:2 [0] NCCL INFO NET/IB : Using {EIGHT} [RO]; OOB ens3:10.0.0.1<0>
node0:1:2 [0] NCCL INFO Using network RCCL-ANP
"""

# ROCm/rccl-tests#163: RCCL 2.21.5 without libibverbs.
SOCKET = """\
z292:58192:58192 [0] NCCL INFO Bootstrap : Using eno2np1:192.168.2.194<0>
z292:58192:58192 [0] NCCL INFO NET/Plugin: No plugin found (librccl-net.so)
z292:58192:58192 [0] NCCL INFO NET/Plugin: Plugin load returned 2 : librccl-net.so: cannot open shared object \
file: No such file or directory : when loading librccl-net.so
z292:58192:58192 [0] NCCL INFO NET/Plugin: Using internal network plugin.
z292:58192:58200 [2] NCCL INFO Failed to open libibverbs.so[.1]
z292:58192:58200 [2] NCCL INFO NET/Socket : Using [0]eno2np1:192.168.2.194<0>
z292:58192:58200 [2] NCCL INFO Using non-device net plugin version 0
z292:58192:58200 [2] NCCL INFO Using network Socket
"""

# NVIDIA/nccl#1925: NCCL 2.28 on InfiniBand.
INFINIBAND = """\
nccl-sleep-2bp29:2620971:2620971 [3] NCCL INFO NCCL_IB_HCA set to mlx5_0
nccl-sleep-2bp29:2620971:2620971 [3] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:172.25.30.42<0>
nccl-sleep-2bp29:2620971:2620971 [3] NCCL INFO Initialized NET plugin IB
nccl-sleep-2bp29:2620971:2620971 [3] NCCL INFO Using network IB
"""

# A pod with NCCL 2.27, December 2025: no device, the list of devices is empty, NCCL continues with TCP.
NO_DEVICE = """\
llama-3-8b-node-0-0:152:386 [0] NCCL INFO NET/IB : No device found.
llama-3-8b-node-0-0:152:386 [0] NCCL INFO NET/IB : Using [RO]; OOB eth0:10.0.4.51<0>
llama-3-8b-node-0-0:152:386 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.4.51<0>
llama-3-8b-node-0-0:152:386 [0] NCCL INFO Assigned NET plugin Socket to comm
llama-3-8b-node-0-0:152:386 [0] NCCL INFO Using network Socket
"""

# Two nodes with EFA: a plugin whose name has a blank.
LIBFABRIC = """\
nccl-trainjob-node-0-0:172:172 [0] NCCL INFO NET/Plugin: Loaded net plugin Libfabric (v11)
nccl-trainjob-node-0-0:172:172 [0] NCCL INFO Using network AWS Libfabric
"""

# The plugin on HPE Slingshot, with a channel in RCCL's form for its network.
SLINGSHOT = """\
nid005123:41510:41510 [0] NCCL INFO NET/Plugin: Loaded net plugin AWS Libfabric (v9)
nid005123:41510:41510 [0] NCCL INFO Using network AWS Libfabric
nid005123:41510:41602 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/AWS Libfabric/0/GDRDMA
"""

# The plugin of LUMI's containers, as the LUMI user guide quotes it, which does not print libfabric's version.
OLD_PLUGIN = """\
nid005123:41510:41510 [0] NCCL INFO NET/OFI Using aws-ofi-rccl 1.4.0
nid005123:41510:41510 [0] NCCL INFO NET/OFI Selected Provider is cxi
nid005123:41510:41510 [0] NCCL INFO Using network AWS Libfabric
"""

# A newer plugin, on Slingshot with NCCL, by its newer name.
NEW_PLUGIN = """\
x3002c0s31b0n0:33335:33335 [0] NCCL INFO NET/OFI Initializing aws-ofi-nccl 1.19.0
x3002c0s31b0n0:33335:33335 [0] NCCL INFO NET/OFI Using Libfabric version 2.1
x3002c0s31b0n0:33335:33335 [0] NCCL INFO NET/OFI Selected provider is cxi, fabric is cxi (found 4 nics)
x3002c0s31b0n0:33335:33335 [0] NCCL INFO Using network Libfabric
"""

# A plugin whose libfabric has no provider, on Slingshot with NCCL.
NO_PROVIDER = """\
x3002c0s31b0n0:33335:33335 [0] NCCL INFO NET/Plugin: Loaded net plugin AWS Libfabric (v11)
x3002c0s31b0n0:33335:33335 [0] NCCL INFO NET/OFI Initializing aws-ofi-nccl 1.21.1
x3002c0s31b0n0:33335:33335 [0] NCCL INFO NET/OFI Using Libfabric version 2.3
x3002c0s31b0n0:33335:33335 [0] NCCL INFO NET/OFI No eligible providers were found
"""

# NVIDIA's HPC-X plugin.
HPCX = """\
ubuntu:1482:1482 [0] NCCL INFO Plugin Path : /opt/hpcx/nccl_rdma_sharp_plugin/lib/libnccl-net.so
ubuntu:1482:1482 [0] NCCL INFO P2P plugin IBext_v8
ubuntu:1482:1482 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eno1:172.22.116.89<0>
ubuntu:1482:1482 [0] NCCL INFO Using network IBext_v8
"""
