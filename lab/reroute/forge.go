// SPDX-License-Identifier: Apache-2.0

package reroute

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/reroute/liveness"
	"github.com/weir-project/weir/internal/netns"
)

// forge runs an attacker while the link is cut. It reads all packets of the main link, and replays and
// changes them. An end believing one would count it, and report the link up.
func (x *experiment) forge(ctx context.Context) error {
	x.say("replayed, changed and truncated probes for %s, on a cut link", x.forging)
	near, err := newForger(x.world.r1, "r12")
	if err != nil {
		return err
	}
	defer near.close()
	far, err := newForger(x.world.r2, "r21")
	if err != nil {
		return err
	}
	defer far.close()
	time.Sleep(200 * time.Millisecond)
	// An attacker sends packets received at one end to it from the other.
	atNear, atFar := near.heard(), far.heard()
	for end := time.Now().Add(patience); (len(atNear) == 0 || len(atFar) == 0) && time.Now().Before(end); atNear, atFar = near.heard(), far.heard() {
		time.Sleep(10 * time.Millisecond)
	}
	if len(atNear) == 0 || len(atFar) == 0 {
		return fmt.Errorf("the attacker received %d and %d probes and answers, want some of each", len(atNear), len(atFar))
	}
	if _, err := x.world.main.cut(true, true); err != nil {
		return err
	}
	down := func(s liveness.SessionState) bool { return s.Name != "main" || s.Phase == liveness.Down }
	if err := x.world.all(ctx, "both ends report the main link down", down); err != nil {
		return err
	}
	before, err := x.mainSessions(ctx)
	if err != nil {
		return err
	}
	sent, changed := 0, 0
	r := rand.New(rand.NewPCG(uint64(x.env.Seed), 1))
	for end := time.Now().Add(x.forging); time.Now().Before(end); time.Sleep(time.Millisecond) {
		for _, f := range []error{far.send(change(r, atNear[r.IntN(len(atNear))])), near.send(change(r, atFar[r.IntN(len(atFar))]))} {
			if f != nil {
				return f
			}
			sent++
		}
		now, err := x.mainSessions(ctx)
		if err != nil {
			return err
		}
		for i := range now {
			if now[i].Phase != liveness.Down || now[i].Answered != before[i].Answered || now[i].Heard != before[i].Heard {
				changed++
				x.result.Note("believed: %s, answered %d and %d, heard %d and %d", now[i], before[i].Answered, now[i].Answered, before[i].Heard, now[i].Heard)
				before[i] = now[i]
			}
		}
	}
	after, err := x.mainSessions(ctx)
	if err != nil {
		return err
	}
	refused := uint64(0)
	for i := range after {
		for reason, n := range after[i].Counts {
			refused += n - before[i].Counts[reason]
		}
	}
	x.forged = sent
	x.result.Set("forged_sent", float64(sent))
	x.result.Set("forged_accepted", float64(changed))
	x.result.Set("forged_counted", float64(refused))
	if _, err := x.world.main.cut(false, false); err != nil {
		return err
	}
	return x.world.all(ctx, "both links are up again", up)
}

func (x *experiment) mainSessions(ctx context.Context) (out []liveness.SessionState, err error) {
	st, err := liveness.ReadState(ctx, x.world.root)
	for _, s := range st.Sessions {
		if s.Name == "main" {
			out = append(out, s)
		}
	}
	if err == nil && len(out) != 2 {
		err = fmt.Errorf("%d ends of the main link, want 2", len(out))
	}
	return out, err
}

// change modifies a frame within the means of an attacker without the key. The frame stays unchanged, is
// truncated, or gets flipped bits in the TLV, another number, or another hop limit.
func change(r *rand.Rand, frame []byte) []byte {
	f := append([]byte(nil), frame...)
	copy(f[6:12], forgerMAC)
	const tlv = 14 + 40 + 8 + 32 // behind the segments of the routing header
	switch r.IntN(5) {
	case 1:
		for range 1 + r.IntN(3) {
			at := tlv + 2 + r.IntN(len(f)-tlv-2)
			f[at] ^= 1 << r.IntN(8)
		}
	case 2:
		seq := binary.BigEndian.Uint32(f[tlv+8:])
		binary.BigEndian.PutUint32(f[tlv+8:], seq+uint32(1+r.IntN(1000)))
	case 3:
		f = f[:14+40+r.IntN(len(f)-14-40)]
	case 4:
		f[14+7] = byte(r.IntN(254))
	}
	return f
}

// forger is a packet socket at a device. It receives through a ring with separate copies, because the
// router changes packets in place.
type forger struct {
	fd   int
	ring []byte
}

const (
	ringFrame  = 2048
	ringFrames = 128
)

func newForger(ns *netns.Handle, device string) (*forger, error) {
	f := &forger{}
	index, err := deviceIndex(ns, device)
	if err != nil {
		return nil, err
	}
	if err := ns.Do(func() error { return f.open(index) }); err != nil {
		return nil, fmt.Errorf("attach an attacker at %s: %w", device, err)
	}
	return f, nil
}

func (f *forger) open(index int) (err error) {
	all := binary.NativeEndian.Uint16([]byte{0, unix.ETH_P_ALL}) // before IPv6, because it changes its packets
	if f.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(all)); err != nil {
		return err
	}
	const block = 1 << 16
	ring := unix.TpacketReq{Block_size: block, Block_nr: ringFrames * ringFrame / block, Frame_size: ringFrame, Frame_nr: ringFrames}
	err = errors.Join(
		// On the wire, behind the router's own programs.
		unix.SetsockoptInt(f.fd, unix.SOL_PACKET, unix.PACKET_QDISC_BYPASS, 1),
		unix.SetsockoptTpacketReq(f.fd, unix.SOL_PACKET, unix.PACKET_RX_RING, &ring))
	if err == nil {
		f.ring, err = unix.Mmap(f.fd, 0, ringFrames*ringFrame, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err == nil {
		err = unix.Bind(f.fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: index})
	}
	return err
}

func (f *forger) close() {
	_ = unix.Munmap(f.ring)
	unix.Close(f.fd)
}

func (f *forger) send(frame []byte) error {
	if err := unix.Send(f.fd, frame, 0); err != nil && !errors.Is(err, unix.ENOBUFS) {
		return fmt.Errorf("send a forged probe: %w", err)
	}
	return nil
}

// heard returns the received probes.
func (f *forger) heard() (out [][]byte) {
	for i := range ringFrames {
		slot := f.ring[i*ringFrame : (i+1)*ringFrame]
		// struct tpacket_hdr (include/uapi/linux/if_packet.h): status, length, captured length, offset of
		// the frame; struct sockaddr_ll follows.
		status, length := binary.NativeEndian.Uint64(slot), binary.NativeEndian.Uint32(slot[12:])
		at := int(binary.NativeEndian.Uint16(slot[16:]))
		const kind = 32 + 10
		if status&unix.TP_STATUS_USER == 0 || at+int(length) > len(slot) || slot[kind] != unix.PACKET_HOST {
			continue
		}
		if b := slot[at : at+int(length)]; len(b) >= 150 && b[20] == unix.IPPROTO_ROUTING {
			out = append(out, append([]byte(nil), b...))
		}
	}
	return out
}
