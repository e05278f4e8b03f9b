// SPDX-License-Identifier: Apache-2.0

package dplane

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/internal/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// recorder is an engine with sessions up at once.
type recorder struct {
	mu       sync.Mutex
	client   *Client
	sessions map[uint32]Session
	owners   map[uint32]Owner
	deleted  int
}

func (r *recorder) Add(s Session, o Owner) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sessions[s.Config.Discriminator], r.owners[s.Config.Discriminator] = s, o
	state := bfd.Up
	if s.Config.Down {
		state = bfd.AdminDown
	}
	go r.client.Tell(Change{Discriminator: s.Config.Discriminator, State: state,
		Remote: bfd.Remote{Discriminator: 77, Multiplier: 5, DesiredTx: 20 * time.Millisecond, RequiredRx: 30 * time.Millisecond}})
	return nil
}

func (r *recorder) Lost(d uint32) { r.Delete(d) }

func (r *recorder) Delete(d uint32) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.sessions, d)
	delete(r.owners, d)
	r.deleted++
}

func (r *recorder) Counters(uint32) Counters { return Counters{In: 11, Out: 13} }

func (r *recorder) all() map[netip.Addr]Session {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := map[netip.Addr]Session{}
	for _, s := range r.sessions {
		out[s.Peer] = s
	}
	return out
}

// frr is a real bfdd, with the zebra telling it the devices.
type frr struct {
	t          *testing.T
	dir        string
	zebra, bfd *exec.Cmd
}

const frrDirectory = "/usr/lib/frr/"

func startFRR(t *testing.T, peers string) *frr {
	nstest.NeedRoot(t)
	if _, err := os.Stat(frrDirectory + "bfdd"); err != nil {
		t.Skip("need: tool bfdd (Debian package frr)")
	}
	if _, err := exec.LookPath("vtysh"); err != nil {
		t.Skip("need: tool vtysh (Debian package frr)")
	}
	dir, err := os.MkdirTemp("", "weir-bfdd")
	if err != nil {
		t.Fatal(err)
	}
	f := &frr{t: t, dir: dir}
	t.Cleanup(func() { os.RemoveAll(dir) })
	for name, text := range map[string]string{"bfdd.conf": "bfd\n" + peers, "zebra.conf": "", "vtysh.conf": ""} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := exec.Command("chown", "-R", "frr:frr", dir).CombinedOutput(); err != nil {
		t.Fatalf("chown: %v: %s", err, out)
	}
	f.zebra = f.start("zebra")
	f.there("zserv")
	f.startBFD()
	return f
}

func (f *frr) startBFD() {
	f.bfd = f.start("bfdd", "--bfdctl", filepath.Join(f.dir, "ctl"), "--dplaneaddr", "unix:"+f.socket())
	f.there("bfdd.vty")
}

func (f *frr) socket() string { return filepath.Join(f.dir, "dplane") }

func (f *frr) start(name string, args ...string) *exec.Cmd {
	f.t.Helper()
	path := func(p string) string { return filepath.Join(f.dir, p) }
	c := exec.Command(frrDirectory+name, append([]string{"-u", "frr", "-g", "frr", "-f", path(name + ".conf"), "-i", path(name + ".pid"),
		"-z", path("zserv"), "--vty_socket", f.dir, "-P", "0"}, args...)...)
	if err := c.Start(); err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { kill(c) })
	return c
}

func kill(c *exec.Cmd) {
	_ = c.Process.Kill()
	_ = c.Wait()
}

func (f *frr) there(file string) {
	f.t.Helper()
	// The file exists a moment before it accepts connections.
	eventually(f.t, file+" of FRR's is there", func() bool {
		c, err := net.Dial("unix", filepath.Join(f.dir, file))
		if err == nil {
			c.Close()
		}
		return err == nil
	})
}

// eventually gives FRR's daemons five minutes.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	nstest.Within(t, 5*time.Minute, func() error {
		if !f() {
			return errors.New("not yet: " + what)
		}
		return nil
	})
}

func (f *frr) vtysh(commands ...string) string {
	f.t.Helper()
	args := []string{"--vty_socket", f.dir, "--config_dir", f.dir}
	for _, c := range commands {
		args = append(args, "-c", c)
	}
	ctx, cancel := context.WithTimeout(f.t.Context(), time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, "vtysh", args...).CombinedOutput()
	if err != nil {
		f.t.Fatalf("vtysh %q: %v: %s", commands, err, out)
	}
	return string(out)
}

// shown is bfdd's output about its peers, by address.
type shown struct {
	Peer     netip.Addr
	Status   string
	RemoteID uint32 `json:"remote-id"`
	Mult     int    `json:"remote-detect-multiplier"`
	Tx       int    `json:"remote-transmit-interval"`
	Rx       int    `json:"remote-receive-interval"`
}

func (f *frr) peers() map[netip.Addr]shown {
	f.t.Helper()
	var all []shown
	if err := json.Unmarshal([]byte(f.vtysh("show bfd peers json")), &all); err != nil {
		f.t.Fatal(err)
	}
	out := map[netip.Addr]shown{}
	for _, p := range all {
		out[p.Peer] = p
	}
	return out
}

func (f *frr) up() (n int) {
	for _, p := range f.peers() {
		if p.Status == "up" {
			n++
		}
	}
	return n
}

// All of a real bfdd's two hundred sessions arrive, though it sends a connection 58 and forgets the others. They
// follow its operator's commands, and arrive again after bfdd was killed.
func TestWithBFDD(t *testing.T) {
	const sessions = 200
	var peers strings.Builder
	address := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 9, 0, byte(2 + i)}) }
	for i := range sessions {
		fmt.Fprintf(&peers, " peer %s local-address 10.9.0.1 interface w0\n  receive-interval 20\n  transmit-interval 15\n  detect-multiplier 4\n exit\n", address(i))
	}
	fmt.Fprint(&peers, " peer fd09::2 local-address fd09::1 interface w0\n  passive-mode\n exit\n")
	nstest.NeedRoot(t)
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "w0", Flags: 1}, PeerName: "w1"}); err != nil {
		t.Fatal(err)
	}
	w0, err := netlink.LinkByName("w0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { netlink.LinkDel(w0) })
	f := startFRR(t, peers.String())
	r := &recorder{sessions: map[uint32]Session{}, owners: map[uint32]Owner{}}
	r.client = New("unix", f.socket(), r, nil, slog.New(slog.NewTextHandler(testWriter{t}, nil)))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.client.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if n := len(r.all()); n != 0 {
			t.Errorf("%d sessions left after the end", n)
		}
	}()
	eventually(t, "all sessions have been handed over", func() bool { return len(r.all()) == sessions+1 })
	s := r.all()[address(7)]
	want := bfd.Config{Discriminator: s.Config.Discriminator, Multiplier: 4, DesiredTx: 15 * time.Millisecond, RequiredRx: 20 * time.Millisecond}
	if s.Config != want || s.Local != netip.MustParseAddr("10.9.0.1") || s.Device != "" && (s.Device != "w0" || s.Ifindex != w0.Attrs().Index) || s.Multihop || s.HopLimit != 255 {
		t.Errorf("%+v", s)
	}
	if s := r.all()[netip.MustParseAddr("fd09::2")]; !s.Config.Passive || s.Local != netip.MustParseAddr("fd09::1") || s.Config.Multiplier != 3 {
		t.Errorf("%+v", s)
	}
	eventually(t, "bfdd shows all of them up", func() bool { return f.up() == sessions+1 })
	if p := f.peers()[address(3)]; p.RemoteID != 77 || p.Mult != 5 || p.Tx != 20 || p.Rx != 30 {
		t.Errorf("bfdd shows %+v", p)
	}
	if got := f.vtysh("show bfd peer 10.9.0.5 local-address 10.9.0.1 interface w0 counters json"); !strings.Contains(strings.ReplaceAll(got, " ", ""), `"control-packet-input":11`) {
		t.Errorf("counters: %s", got)
	}
	peer := func(i int) []string {
		return []string{"configure terminal", "bfd", fmt.Sprintf("peer %s local-address 10.9.0.1 interface w0", address(i))}
	}
	f.vtysh(append(peer(1), "transmit-interval 50")...)
	eventually(t, "another interval", func() bool { return r.all()[address(1)].Config.DesiredTx == 50*time.Millisecond })
	f.vtysh(append(peer(2), "shutdown")...)
	eventually(t, "a shutdown", func() bool { return r.all()[address(2)].Config.Down })
	f.vtysh("configure terminal", "bfd", fmt.Sprintf("no peer %s local-address 10.9.0.1 interface w0", address(3)))
	eventually(t, "a session less", func() bool { _, there := r.all()[address(3)]; return !there })
	f.vtysh(peer(201)...)
	eventually(t, "a session more", func() bool { _, there := r.all()[address(201)]; return there })

	kill(f.bfd)
	eventually(t, "sessions of a bfdd that was killed end", func() bool { return len(r.all()) == 0 })
	os.Remove(filepath.Join(f.dir, "bfdd.vty"))
	f.startBFD()
	eventually(t, "all sessions of its file are there again", func() bool { return len(r.all()) == sessions+1 })
	eventually(t, "bfdd shows all of them up again", func() bool { return f.up() == sessions+1 })
}

type testWriter struct{ t testing.TB }

func (w testWriter) Write(b []byte) (int, error) {
	if testing.Verbose() {
		fmt.Fprint(os.Stderr, string(b))
	}
	return len(b), nil
}
