// SPDX-License-Identifier: Apache-2.0

package loaders

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"os/signal"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/lab/loaders/bpf"
)

// holdArg runs the lab's own binary as a loader based on cilium/ebpf: "weir-lab __load HOOK DEVICE".
const holdArg = "__load"

// Play runs the loader's process. In any other process it returns. main calls it.
func Play() {
	if len(os.Args) != 4 || os.Args[1] != holdArg {
		return
	}
	if err := attachAndWait(hookName(os.Args[2]), os.Args[3]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// attachAndWait attaches a program by a link and waits for SIGTERM. The link ends with the process.
func attachAndWait(at hookName, device string) error {
	spec, err := ebpf.LoadCollectionSpecFromReader(bytes.NewReader(bpf.Object()))
	if err != nil {
		return err
	}
	c, err := ebpf.NewCollection(spec)
	if err != nil {
		return err
	}
	defer c.Close()
	i, err := net.InterfaceByName(device)
	if err != nil {
		return err
	}
	ln, err := attach(c, at, i.Index)
	if err != nil {
		return err
	}
	defer ln.Close()
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, unix.SIGTERM)
	<-ended
	return nil
}

func attach(c *ebpf.Collection, at hookName, index int) (link.Link, error) {
	switch at {
	case hookXDP:
		return link.AttachXDP(link.XDPOptions{Interface: index, Program: c.Programs["foreign_xdp"], Flags: link.XDPDriverMode})
	case hookIngress:
		return link.AttachTCX(link.TCXOptions{Interface: index, Program: c.Programs["foreign_tc"], Attach: ebpf.AttachTCXIngress})
	case hookLookup:
		ns, err := os.Open("/proc/self/ns/net")
		if err != nil {
			return nil, err
		}
		defer ns.Close()
		return link.AttachNetNs(int(ns.Fd()), c.Programs["foreign_lookup"])
	}
	return nil, fmt.Errorf("unknown hook %q", at)
}
