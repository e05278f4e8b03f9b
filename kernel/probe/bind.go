// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/kernel"
)

// BindShare is setting SO_REUSEPORT on foreign sockets at bind.
var BindShare = kernel.Need{Name: "bpf_setsockopt(SO_REUSEPORT) in cgroup bind hooks", Since: "6.1", Optional: true,
	For:    "share_port: daemons share a port without asking for it",
	Remedy: "use a newer kernel, or " + withoutShare,
	Probe:  probeBindShare}

// withoutShare is the way to do without the need.
const withoutShare = "leave share_port out, give each daemon a port of its own, and name it with bound: in its member (engine: sk_lookup)"

// probeBindShare sets the option on a socket, because older kernels load the program and refuse the option only at run
// time. The program changes only the probe's own socket. A bind fails if the kernel refuses. It succeeds without the
// option if the program does not run.
func probeBindShare() error {
	cgroup, err := cgroupRoot()
	if err != nil {
		return err
	}
	return withSocket(func(fd int) error {
		cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
		if err != nil {
			return err
		}
		kernel.LiftMemlock()
		p, err := ebpf.NewProgram(bindShareProbe(cookie))
		if err != nil {
			return kernel.ExplainProbe(err)
		}
		defer p.Close()
		l, err := kernel.Cgroup{Path: cgroup, Hook: ebpf.AttachCGroupInet4Bind}.Attach(p)
		if err != nil {
			return kernel.ExplainProbe(err)
		}
		defer l.Close()
		if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); errors.Is(err, unix.EPERM) {
			return errors.New("the kernel rejects the option in this hook")
		} else if err != nil {
			return fmt.Errorf("bind a test socket: %w", err)
		}
		if set, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT); err != nil {
			return err
		} else if set == 0 {
			return &kernel.Lack{Cause: fmt.Sprintf("hooks of the cgroup %s do not reach this process, perhaps in a container", cgroup),
				Remedy: "run weir outside containers, or " + withoutShare}
		}
		return nil
	})
}

// bindShareProbe returns a program that sets SO_REUSEPORT on the socket with a cookie. It forbids the bind after a
// failure, and allows all other binds.
func bindShareProbe(cookie uint64) *ebpf.ProgramSpec {
	return &ebpf.ProgramSpec{Type: ebpf.CGroupSockAddr, AttachType: ebpf.AttachCGroupInet4Bind, License: "Dual BSD/GPL",
		Instructions: asm.Instructions{
			asm.Mov.Reg(asm.R6, asm.R1),
			asm.FnGetSocketCookie.Call(),
			asm.LoadImm(asm.R1, int64(cookie), asm.DWord),
			asm.JNE.Reg(asm.R0, asm.R1, "pass"),
			asm.StoreImm(asm.RFP, -4, 1, asm.Word),
			asm.Mov.Reg(asm.R1, asm.R6),
			asm.Mov.Imm(asm.R2, unix.SOL_SOCKET),
			asm.Mov.Imm(asm.R3, unix.SO_REUSEPORT),
			asm.Mov.Reg(asm.R4, asm.RFP),
			asm.Add.Imm(asm.R4, -4),
			asm.Mov.Imm(asm.R5, 4),
			asm.FnSetsockopt.Call(),
			asm.JEq.Imm(asm.R0, 0, "pass"),
			asm.Mov.Imm(asm.R0, 0),
			asm.Return(),
			asm.Mov.Imm(asm.R0, 1).WithSymbol("pass"),
			asm.Return(),
		}}
}
