// SPDX-License-Identifier: Apache-2.0

// Package probe declares the kernel facilities needed by features. A probe tests the facility, never the kernel version:
// distributions backport and remove features.
package probe

import (
	"errors"
	"net/netip"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/sockdiag"
	"github.com/weir-project/weir/internal/units"
	"github.com/weir-project/weir/kernel"
)

// SkLookup is the program type for steering with sk_lookup.
var SkLookup = kernel.Need{Name: "sk_lookup programs", Since: "5.9", For: "steering by address, without the sockets' help",
	Remedy: "use a newer kernel", Probe: kernel.ProbeProgram(ebpf.SkLookup)}

// SockMap holds references to other processes' sockets.
var SockMap = kernel.Need{Name: "socket maps", Since: "5.8", For: "holding members' sockets",
	Remedy: "the kernel must be built with CONFIG_NET_SOCK_MSG (BPF_STREAM_PARSER)", Probe: kernel.ProbeMap(ebpf.SockMap)}

// ExitTracepoint withdraws a member when its process exits.
var ExitTracepoint = kernel.Need{Name: "raw tracepoint sched_process_exit with BTF", Since: "5.7", Optional: true,
	For:    "withdrawing a member at its exit even if a child keeps its sockets open; without it, when the first socket closes",
	Remedy: "the kernel must be built with CONFIG_DEBUG_INFO_BTF",
	Probe: func() error {
		if !units.IsInitPIDNamespace() {
			return &kernel.Lack{Cause: "weir does not run in the initial pid namespace", Remedy: "run weir outside containers"}
		}
		return probeTracing()
	}}

// SocketTracepoint reports new listeners at once.
var SocketTracepoint = kernel.Need{Name: "raw tracepoint inet_sock_set_state with BTF", Since: "5.7", Optional: true,
	For:    "detecting TCP listeners by event; without it weir serve polls every second",
	Remedy: "the kernel must be built with CONFIG_DEBUG_INFO_BTF", Probe: probeTracing}

// RingBuffer carries events to user space.
var RingBuffer = kernel.Need{Name: "BPF ring buffer", Since: "5.8", Optional: true,
	For: "events of sockets and processes; without it weir serve polls every second", Probe: kernel.ProbeMap(ebpf.RingBuf)}

// PostBind reports bound UDP sockets at once.
var PostBind = kernel.Need{Name: "cgroup post_bind hooks", Since: "4.17", Optional: true,
	For:    "detecting UDP sockets by event; without them weir serve polls every second",
	Remedy: "use a newer kernel",
	Probe: func() error {
		if _, err := cgroupRoot(); err != nil {
			return err
		}
		return kernel.ProbeProgram(ebpf.CGroupSock)()
	}}

// PacketFilter lets a program filter the packets of a packet socket.
var PacketFilter = kernel.Need{Name: "BPF filters of packet sockets", Since: "4.18", Optional: true,
	For:    "storing the templates of flow exporters for starting collectors; without them a collector waits until the exporter sends them again",
	Remedy: "the kernel must be built with CONFIG_PACKET", Probe: probePacketFilter}

// TCFilter is a filter of a device's incoming packets, with its helpers.
var TCFilter = kernel.Need{Name: "tc filters that copy packets", Since: "4.18", Optional: true,
	For:    "copy: sending a service's datagrams to a second service too",
	Remedy: "the kernel must be built with CONFIG_NET_CLS_BPF and CONFIG_NET_SCH_INGRESS", Probe: probeTCFilter}

// TCRedirect is a program at a device that redirects packets, also into tunnels, and exchanges words of a map.
var TCRedirect = kernel.Need{Name: "tc programs with bpf_check_mtu", Since: "5.12", For: "the data path of a load balancer",
	Remedy: "use a newer kernel", Probe: func() error {
		kernel.LiftMemlock()
		return kernel.ExplainProbe(features.HaveProgramHelper(ebpf.SchedCLS, asm.FnCheckMtu)) // the newest helper in use
	}}

// RedirectNeigh is a program at a device that redirects packets to a neighbour on another device.
var RedirectNeigh = kernel.Need{Name: "tc programs with bpf_redirect_neigh", Since: "5.10", For: "rerouting around links that are down",
	Remedy: "use a newer kernel", Probe: func() error {
		kernel.LiftMemlock()
		return kernel.ExplainProbe(features.HaveProgramHelper(ebpf.SchedCLS, asm.FnRedirectNeigh))
	}}

// PidfdGetfd adopts sockets of unmodified processes.
var PidfdGetfd = kernel.Need{Name: "pidfd_getfd", Since: "5.6", For: "adopting sockets of unmodified processes",
	Remedy: "use a newer kernel", Probe: probePidfdGetfd}

// SockDiag finds sockets and reads their queues.
var SockDiag = kernel.Need{Name: "sock_diag for TCP and UDP", Since: "3.3", For: "finding members' sockets and reading their queues",
	Remedy: "modprobe tcp_diag udp_diag", Probe: probeSockDiag}

// DiagDestroy closes TCP sessions of other processes.
var DiagDestroy = kernel.Need{Name: "sock_diag's closing of sockets", Since: "4.5", Optional: true,
	For:    "resetting misplaced TCP sessions of routers; without it they are only listed",
	Remedy: "the kernel must be built with CONFIG_INET_DIAG_DESTROY",
	Probe: func() error {
		// Destroy a non-existent socket: with the facility and the right the answer is ErrNoSocket.
		err := sockdiag.Destroy(sockdiag.Socket{Proto: unix.IPPROTO_TCP, Family: unix.AF_INET, Cookie: 1,
			Local:  netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), 1),
			Remote: netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), 1)})
		if errors.Is(err, sockdiag.ErrNoSocket) {
			return nil
		}
		return kernel.ExplainProbe(err)
	}}

// cgroupRoot returns the mount point of cgroup2. A missing one has its own remedy: another kernel would not help.
func cgroupRoot() (string, error) {
	root, err := units.CgroupRoot()
	if errors.Is(err, errors.ErrUnsupported) {
		err = &kernel.Lack{Cause: "cgroup2 is not mounted",
			Remedy: "mount -t cgroup2 none /sys/fs/cgroup/unified, or boot with systemd.unified_cgroup_hierarchy=1"}
	}
	return root, err
}

// probeTracing loads a minimal raw tracepoint program and checks for BTF.
func probeTracing() error {
	if _, err := os.Stat("/sys/kernel/btf/vmlinux"); err != nil {
		return err
	}
	kernel.LiftMemlock()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.RawTracepoint, License: "Dual BSD/GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}})
	if err != nil {
		return kernel.ExplainProbe(err)
	}
	return p.Close()
}

func probePacketFilter() error {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if errors.Is(err, os.ErrPermission) {
		return kernel.ExplainProbe(err)
	} else if err != nil {
		return err
	}
	unix.Close(fd)
	kernel.LiftMemlock()
	return kernel.ExplainProbe(features.HaveProgramHelper(ebpf.SocketFilter, asm.FnSkbLoadBytesRelative))
}

func probeTCFilter() error {
	kernel.LiftMemlock()
	for _, helper := range []asm.BuiltinFunc{asm.FnCloneRedirect, asm.FnFibLookup} {
		if err := features.HaveProgramHelper(ebpf.SchedCLS, helper); err != nil {
			return kernel.ExplainProbe(err)
		}
	}
	return nil
}

func probePidfdGetfd() error {
	fd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	dup, err := unix.PidfdGetfd(fd, fd, 0)
	if errors.Is(err, os.ErrPermission) { // no right is needed for the own descriptor
		return &kernel.Lack{Cause: "pidfd_getfd is forbidden", Remedy: "allow it in the seccomp filter of the container or unit"}
	} else if err != nil {
		return err
	}
	return unix.Close(dup)
}

func probeSockDiag() error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

func withSocket(f func(fd int) error) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return f(fd)
}
