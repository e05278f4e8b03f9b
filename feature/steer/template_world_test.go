// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"bufio"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/weir-project/weir/internal/ipfix"
	"github.com/weir-project/weir/internal/ipfix/ipfixtest"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// runRecorder prints every received datagram and its source until its input ends.
func runRecorder(args []string) error {
	network, addr := args[0], args[1]
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) { unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) })
	}}
	p, err := lc.ListenPacket(context.Background(), network, addr)
	if err != nil {
		return err
	}
	fmt.Println("ready")
	go func() {
		b := make([]byte, 1<<16)
		for {
			n, from, err := p.(*net.UDPConn).ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			fmt.Println(netip.AddrPortFrom(from.Addr().Unmap(), from.Port()), hex.EncodeToString(b[:n]))
		}
	}()
	bufio.NewReader(os.Stdin).ReadByte()
	return nil
}

// recorder is a collector that records its datagrams.
type recorder struct {
	sink
	mu  sync.Mutex
	got []received
}

type received struct {
	from    netip.AddrPort
	payload []byte
}

func startRecorder(t testing.TB, network, addr string) *recorder {
	t.Helper()
	r := &recorder{sink: sink{Process: nstest.StartReady(t, nstest.Child("recorder", network, addr)), t: t}}
	go func() {
		for {
			line, ok := r.Line()
			if !ok {
				return
			}
			from, text, _ := strings.Cut(line, " ")
			payload, err := hex.DecodeString(text)
			a, aerr := netip.ParseAddrPort(from)
			if err != nil || aerr != nil {
				continue
			}
			r.mu.Lock()
			r.got = append(r.got, received{a, payload})
			r.mu.Unlock()
		}
	}()
	return r
}

// received returns the datagrams received so far.
func (r *recorder) received() []received {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]received{}, r.got...)
}

// await waits until n datagrams are received.
func (r *recorder) await(n int) []received {
	r.t.Helper()
	var got []received
	nstest.Eventually(r.t, func() error {
		if got = r.received(); len(got) < n {
			return fmt.Errorf("%d datagrams came, want %d", len(got), n)
		}
		return nil
	})
	return got
}

// cable connects the test's namespace to a namespace for exporters.
func cable(t testing.TB) *netns.Handle {
	t.Helper()
	nstest.NeedRoot(t)
	name := "exporters"
	ns, err := netns.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ns.Close(); netns.Delete(name) })
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "collect0"}, PeerName: "export0", PeerNamespace: netlink.NsFd(ns.FD())}
	if err := netlink.LinkAdd(veth); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { netlink.LinkDel(veth) })
	up := func(link, v4, v6 string) error {
		l, err := netlink.LinkByName(link)
		if err != nil {
			return err
		}
		for _, a := range []string{v4, v6} {
			addr, err := netlink.ParseAddr(a)
			if err != nil {
				return err
			}
			addr.Flags = unix.IFA_F_NODAD
			if err := netlink.AddrAdd(l, addr); err != nil {
				return err
			}
		}
		return netlink.LinkSetUp(l)
	}
	if err := up("collect0", "10.1.0.1/24", "fd00:1:0::1/64"); err != nil {
		t.Fatal(err)
	}
	if err := ns.Do(func() error { return up("export0", "10.1.0.2/24", "fd00:1:0::2/64") }); err != nil {
		t.Fatal(err)
	}
	// An end that came up before the other one sends only after the kernel has noticed the carrier, which takes a
	// while.
	for _, way := range []struct {
		from, to         *netns.Handle
		fromAddr, toAddr string
	}{{ns, here(t), "10.1.0.2", "10.1.0.1"}, {ns, here(t), "fd00:1:0::2", "fd00:1:0::1"}, {here(t), ns, "10.1.0.1", "10.1.0.2"}, {here(t), ns, "fd00:1:0::1", "fd00:1:0::2"}} {
		from := nstest.ListenUDP(t, way.from, netip.AddrPortFrom(netip.MustParseAddr(way.fromAddr), 0))
		to := nstest.ListenUDP(t, way.to, netip.AddrPortFrom(netip.MustParseAddr(way.toAddr), 0))
		deadline(t, func() bool { return nstest.Arrives(t, from, to, false) })
		from.Close()
		to.Close()
	}
	return ns
}

// flowExporter is one exporting process.
type flowExporter struct {
	t       testing.TB
	conn    *net.UDPConn
	version uint16
	domain  uint32
	seq     uint32
}

func newExporter(t testing.TB, ns *netns.Handle, version uint16, from netip.Addr, to netip.AddrPort) *flowExporter {
	t.Helper()
	e := &flowExporter{t: t, version: version, domain: 7, seq: 1000}
	dial := func() (err error) {
		e.conn, err = net.DialUDP("udp", &net.UDPAddr{IP: from.AsSlice()}, net.UDPAddrFromAddrPort(to))
		return err
	}
	var err error
	if ns != nil {
		err = ns.Do(dial)
	} else {
		err = dial()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.conn.Close() })
	return e
}

func (e *flowExporter) addr() netip.AddrPort { return e.conn.LocalAddr().(*net.UDPAddr).AddrPort() }

// send sends a message with the given sets and number of data records.
func (e *flowExporter) send(records int, sets ...[]byte) {
	e.t.Helper()
	h := ipfix.Header{Version: e.version, Domain: e.domain, Sequence: e.seq, ExportTime: uint32(time.Now().Unix()), Uptime: 5000}
	b := ipfixtest.Message(h, sets...)
	if _, err := e.conn.Write(b); errors.Is(err, syscall.ECONNREFUSED) {
		e.conn.Write(b) // the error concerned an earlier datagram to a closed port
	}
	if e.version == ipfix.NetFlow9 {
		e.seq++
	} else {
		e.seq += uint32(records)
	}
}

// sendTemplates sends the example templates.
func (e *flowExporter) sendTemplates() {
	e.t.Helper()
	t := ipfixtest.Templates(e.version)
	options := t[1].Record
	if e.version == ipfix.NetFlow9 {
		options = append(append([]byte{}, options...), 0, 0)
	}
	e.send(0, ipfixtest.Set(ipfix.SetID(e.version, false), t[0].Record...), ipfixtest.Set(ipfix.SetID(e.version, true), options...))
}

// sendData sends a message of n records of template 260.
func (e *flowExporter) sendData(n int) {
	e.t.Helper()
	e.send(n, ipfixtest.Set(260, make([]byte, 12*n)...))
}

func mustListen(t testing.TB, s string) service.Listen {
	t.Helper()
	l, err := service.ParseListen(s)
	if err != nil {
		t.Fatal(err)
	}
	return l
}
