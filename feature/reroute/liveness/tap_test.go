// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/reroute/liveness/bpf"
	"github.com/weir-project/weir/internal/ethtool"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// tap is a device with packets from the test. Programs see them on arrival; the last one counts.
type tap struct {
	b     *bench
	fd    int
	mac   []byte
	after *ebpf.Map
}

func newTap(t *testing.T, program string) *tap {
	t.Helper()
	d := &tap{b: newBench(t), fd: -1}
	if err := kernel.TCXLink.Check(); err != nil {
		t.Skip("need: kernel", err)
	}
	ns := nstest.NewNetns(t)
	err := ns.Do(func() (err error) {
		if d.fd, err = unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0); err != nil {
			return err
		}
		r, err := unix.NewIfreq("tap")
		if err != nil {
			return err
		}
		r.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_NAPI | unix.IFF_NAPI_FRAGS)
		return unix.IoctlIfreq(d.fd, unix.TUNSETIFF, r)
	})
	t.Cleanup(func() { unix.Close(d.fd) })
	if errors.Is(err, unix.ENOENT) {
		t.Skip("need: kernel with TAP devices (CONFIG_TUN)")
	} else if err != nil {
		t.Fatal(err)
	}
	after := d.counter()
	inside(t, ns, func() error {
		l, err := netlink.LinkByName("tap")
		if err != nil {
			return err
		}
		d.mac = l.Attrs().HardwareAddr
		// GRO would pull headers into the linear part.
		if err := errors.Join(ethtool.Set("tap", unix.ETHTOOL_SGRO, false), netlink.LinkSetUp(l)); err != nil {
			return err
		}
		for _, p := range []*ebpf.Program{d.b.c.Programs[program], after} {
			ln, err := kernel.TCX{Ifindex: l.Attrs().Index, Device: "tap"}.Attach(p)
			if err != nil {
				return err
			}
			t.Cleanup(func() { ln.Close() })
		}
		return nil
	})
	return d
}

// counter returns a program counting and dropping packets of a probe's length.
func (d *tap) counter() *ebpf.Program {
	t := d.b.t
	t.Helper()
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "Dual BSD/GPL", Instructions: asm.Instructions{
		asm.LoadMem(asm.R2, asm.R1, 0 /* len */, asm.Word),
		asm.JNE.Imm(asm.R2, int32(frameBytes), "out"),
		asm.LoadMapValue(asm.R1, m.FD(), 0),
		asm.Mov.Imm(asm.R2, 1),
		asm.StoreXAdd(asm.R1, asm.R2, asm.DWord),
		asm.Mov.Imm(asm.R0, 2 /* TC_ACT_SHOT */).WithSymbol("out"),
		asm.Return(),
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	d.after = m
	return p
}

// receives makes a packet arrive, in pieces; the first piece is the linear part.
func (d *tap) receives(pieces ...[]byte) {
	d.b.t.Helper()
	copy(pieces[0], d.mac)
	if _, err := unix.Writev(d.fd, pieces); err != nil {
		d.b.t.Fatal(err)
	}
}

// behind returns the number of packets passed on by the program.
func (d *tap) behind() (n uint64) {
	d.b.t.Helper()
	if err := d.after.Lookup(uint32(0), &n); err != nil {
		d.b.t.Fatal(err)
	}
	return n
}

// until waits for a number of answers of the session.
func (d *tap) until(answers uint32) {
	d.b.t.Helper()
	nstest.Eventually(d.b.t, func() error {
		if d.b.state().Answers < answers {
			return fmt.Errorf("%d answers, want %d; counted %v", d.b.state().Answers, answers, d.b.counted())
		}
		return nil
	})
}

// sent sets the number of probes sent by the session.
func (b *bench) sent(probes uint32) {
	b.t.Helper()
	s := b.state()
	s.Seq = probes
	if err := b.maps[pinStates].Put(uint32(0), s); err != nil {
		b.t.Fatal(err)
	}
}

// An answer with only the Ethernet header in the linear part. Drivers leave the rest on the pages written by the
// card.
func TestPieces(t *testing.T) {
	d := newTap(t, bpf.LivenessProgLivenessReturn)
	d.b.sent(10)
	data := d.b.sign(d.b.answer(5))
	d.receives(data[:14], data[14:60], data[60:])
	d.until(1)
}

// A packet for a device above the session's (a VLAN, a macvlan) passes untouched, because another session may judge
// it. A priority tag without a VLAN changes nothing.
func TestForAnotherDevice(t *testing.T) {
	tagged := func(data []byte, vlan uint16) []byte {
		tag := binary.BigEndian.AppendUint16([]byte{0x81, 0}, 7<<13|vlan)
		return slices.Concat(data[:12], tag, data[12:])
	}
	for _, c := range []struct {
		name  string
		make  func(d *tap, data []byte)
		taken uint32
	}{
		{"VLAN 7", func(d *tap, data []byte) { d.receives(tagged(data, 7)) }, 0},
		{"VLAN 4094", func(d *tap, data []byte) { d.receives(tagged(data, 4094)) }, 0},
		{"a priority", func(d *tap, data []byte) { d.receives(tagged(data, 0)) }, 1},
		{"another link address", func(d *tap, data []byte) { d.mac[5] ^= 1; d.receives(data); d.mac[5] ^= 1 }, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := newTap(t, bpf.LivenessProgLivenessReturn)
			d.b.sent(10)
			own := d.b.sign(d.b.answer(6))
			c.make(d, bytes.Clone(d.b.sign(d.b.answer(5))))
			d.receives(own)
			d.until(1 + c.taken)
			if s, behind := d.b.state(), d.behind(); s.Answers != 1+c.taken || behind != uint64(1-c.taken) || len(d.b.counted()) != 0 {
				t.Errorf("%d answers, %d packets went on, counted %v; want %d, %d, nothing", s.Answers, behind, d.b.counted(), 1+c.taken, 1-c.taken)
			}
		})
	}
}
