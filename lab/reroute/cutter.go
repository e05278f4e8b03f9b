// SPDX-License-Identifier: Apache-2.0

package reroute

import (
	"fmt"
	"net"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/lab"
)

// cutter is a link with a cut for each direction, effective from one packet to the next. An end with a set
// word drops incoming packets before all other programs, except frames from a forger.
type cutter struct {
	words *ebpf.Map // of the ends: nonzero drops incoming packets
}

// forgerMAC is the source of an attacker's frames. They also pass a cut link, to test whether they are
// believed.
var forgerMAC = net.HardwareAddr{0x02, 0x66, 0xff, 0xee, 0xdd, 0xcc}

func newCutter(e *lab.Env, ends [2]*netns.Handle, devices [2]string) (*cutter, error) {
	m, err := ebpf.NewMap(words())
	if err != nil {
		return nil, fmt.Errorf("create a link with cuts: %w", err)
	}
	e.OnClose(func() { m.Close() })
	for i, ns := range ends {
		p, err := program(m, i)
		if err != nil {
			return nil, fmt.Errorf("create a link with cuts: %w", err)
		}
		err = ns.Do(func() error {
			device, err := net.InterfaceByName(devices[i])
			if err != nil {
				return err
			}
			l, err := link.AttachTCX(link.TCXOptions{Interface: device.Index, Program: p, Attach: ebpf.AttachTCXIngress, Anchor: link.Head()})
			if err == nil {
				e.OnClose(func() { l.Close() })
			}
			return err
		})
		p.Close()
		if err != nil {
			return nil, fmt.Errorf("attach the cut to link %s: %w", devices[i], err)
		}
	}
	return &cutter{m}, nil
}

func words() *ebpf.MapSpec {
	return &ebpf.MapSpec{Name: "lab_cut", Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 2}
}

// program returns the program of an end.
func program(m *ebpf.Map, end int) (*ebpf.Program, error) {
	return ebpf.NewProgram(&ebpf.ProgramSpec{Name: "lab_cut", Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.StoreImm(asm.RFP, -4, int64(end), asm.Word),
		asm.LoadMapPtr(asm.R1, m.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, -4),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "pass"),
		asm.LoadMem(asm.R0, asm.R0, 0, asm.Word),
		asm.JEq.Imm(asm.R0, 0, "pass"),
		asm.LoadAbs(6, asm.Word), // the source address of the packet in R6
		asm.JNE.Imm(asm.R0, 0x0266ffee, "drop"),
		asm.Mov.Imm(asm.R0, -1).WithSymbol("pass"), // TCX_NEXT
		asm.Return(),
		asm.Mov.Imm(asm.R0, 2).WithSymbol("drop"), // TC_ACT_SHOT
		asm.Return(),
	}})
}

// cut sets or clears the loss of incoming packets for each end: the first is r1's, receiving from r2. It
// returns a moment of CLOCK_MONOTONIC in ns; no packet is lost before it.
func (c *cutter) cut(atR1, atR2 bool) (moment uint64, err error) {
	moment = kernel.Monotonic()
	for i, on := range []bool{atR1, atR2} {
		var v uint32
		if on {
			v = 1
		}
		if err := c.words.Put(uint32(i), v); err != nil {
			return 0, fmt.Errorf("cut a link: %w", err)
		}
	}
	return moment, nil
}
