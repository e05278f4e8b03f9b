// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature/reroute"
	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/bfd/engine"
	"github.com/weir-project/weir/feature/reroute/frrtest"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// The sessions of a real bfdd, run by weir serve, stay up at both ends while weir serve is restarted and killed under
// systemd. A final stop of weir serve takes them down at bfdd.
func TestBFDDSeesNoRestart(t *testing.T) {
	const sessions = 70 // more sessions than bfdd announces on one connection
	nstest.NeedRoot(t)
	frrtest.Need(t, "bfdd")
	if err := kernel.Require(engine.Needs()); err != nil {
		t.Skip("need: kernel", err)
	}
	dir := buildWeir(t)
	nstest.Enter(t)
	here, there := nstest.NewNetns(t), nstest.NewNetns(t)
	nstest.Cable(t, here, "w0", there, "w0")
	var text [2]strings.Builder
	for i, ns := range []*netns.Handle{here, there} {
		err := ns.Do(func() error {
			l, err := netlink.LinkByName("w0")
			for n := range sessions {
				if err == nil {
					err = netlink.AddrAdd(l, &netlink.Addr{IPNet: netlink.NewIPNet(netip.AddrFrom4([4]byte{10, 9, byte(1 + i), byte(1 + n)}).AsSlice())})
				}
			}
			if err == nil {
				err = netlink.AddrAdd(l, &netlink.Addr{IPNet: netlink.NewIPNet(netip.AddrFrom4([4]byte{10, 9, 0, byte(1 + i)}).AsSlice())})
			}
			if err == nil {
				all := &net.IPNet{IP: net.IPv4(10, 9, 0, 0), Mask: net.CIDRMask(16, 32)}
				err = netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: all})
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintln(&text[i], "bfd")
		for n := range sessions {
			// A silence of 6 s would end a session, as in the test's own timeout.
			fmt.Fprintf(&text[i], " peer 10.9.%d.%d local-address 10.9.%d.%d interface w0\n  detect-multiplier 20\n  receive-interval 300\n  transmit-interval 300\n exit\n",
				2-i, 1+n, 1+i, 1+n)
		}
	}
	near := frrtest.Start(t, here, "near", map[string]string{"bfdd": text[0].String()}, "--dplaneaddr", "unix:{home}/dplane")
	far := frrtest.Start(t, there, "far", map[string]string{"bfdd": text[1].String()})

	pins, conf, socket := filepath.Join(nstest.BPFFS, "weir-bfdd-unit"), filepath.Join(dir, "weir.yaml"), filepath.Join(dir, "weir.sock")
	ref := fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), here.FD())
	if err := os.WriteFile(conf, fmt.Appendf(nil, "reroute:\n  - {name: frr, netns: %s, frr: \"unix:%s/dplane\"}\n", ref, near.Home), 0o644); err != nil {
		t.Fatal(err)
	}
	weir := func(args ...string) string {
		t.Helper()
		out, err := exec.Command(filepath.Join(dir, "weir"), append(args, "--root", pins)...).CombinedOutput()
		if err != nil {
			t.Fatalf("weir %q: %v\n%s", args, err, out)
		}
		return string(out)
	}
	weir("apply", "-f", conf)
	t.Cleanup(func() { weir("remove") })
	systemctl := nstest.Systemd(t, map[string]string{"serve.service": "[Unit]\nStartLimitIntervalSec=0\n[Service]\nExecStart=" + filepath.Join(dir, "weir") +
		" serve --listen= --root " + pins + " --socket " + socket + "\nRestart=always\nRestartSec=100ms\n" + storeLine(t) + "\n"})
	must := mustRun(t, systemctl)
	must("start", "serve.service")

	up := func(r *frrtest.Router) int {
		return strings.Count(strings.ReplaceAll(r.Vtysh("show bfd peers json"), " ", ""), `"status":"up"`)
	}
	// downs returns how often sessions went down, as counted by bfdd.
	downs := func(r *frrtest.Router) (n int) {
		var all []struct {
			Downs int `json:"session-down"`
		}
		if err := json.Unmarshal([]byte(r.Vtysh("show bfd peers counters json")), &all); err != nil || len(all) != sessions {
			t.Fatalf("%d sessions, %v", len(all), err)
		}
		for _, s := range all {
			n += s.Downs
		}
		return n
	}
	eventually := func(what string, f func() bool) {
		t.Helper()
		err := nstest.Poll(2*nstest.Timeout(), func() error {
			if f() {
				return nil
			}
			return errors.New("not yet: " + what)
		})
		if err != nil {
			log, _ := systemctl("status", "-n", "50", "serve.service")
			t.Fatalf("%v\n%s", err, log)
		}
	}
	all := func() bool { return up(near) == sessions && up(far) == sessions }
	eventually("all sessions are up", all)
	shown := func() (out []string) {
		var st reroute.State
		if err := json.Unmarshal([]byte(weir("reroute", "status", "--json")), &st); err != nil {
			t.Fatal(err)
		}
		for _, s := range st.BFD {
			if s.State == bfd.Up && s.FRR != "" && s.Name == "frr:"+s.Peer.String()+"%w0" {
				out = append(out, s.Name)
			}
		}
		return out
	}
	if n := len(shown()); n != sessions {
		t.Errorf("weir reroute status shows %d of the sessions up", n)
	}
	nearDowns, farDowns := downs(near), downs(far)
	pid := func() string {
		out, err := systemctl("show", "--property=MainPID", "serve.service")
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	for i, how := range [][]string{{"restart", "serve.service"}, {"kill", "--kill-whom=main", "--signal=KILL", "serve.service"}, {"restart", "serve.service"}} {
		watch := []time.Duration{0, 0, 8 * time.Second}[i]
		before := pid()
		must(how...)
		eventually("another weir serve", func() bool { return pid() != before && pid() != "MainPID=0\n" })
		// Check at once and, after the last step, once the timeout is over.
		nstest.Steadily(t, watch, func() error {
			if !all() {
				return fmt.Errorf("%s: %d up at the near bfdd, %d at the far one", how[0], up(near), up(far))
			}
			return nil
		})
		if n := len(shown()); n != sessions {
			t.Errorf("%s: weir reroute status shows %d of the sessions up", how[0], n)
		}
		// The next weir serve hears bfdd, and bfdd hears it.
		peer := []string{"configure terminal", "bfd", "peer 10.9.1.7 local-address 10.9.2.7 interface w0"}
		far.Vtysh(append(peer, "shutdown")...)
		eventually(how[0]+": the near bfdd hears that a session is shut down", func() bool { return up(near) == sessions-1 })
		far.Vtysh(append(peer, "no shutdown")...)
		eventually(how[0]+": and that it is up again", all)
		nearPeer := []string{"configure terminal", "bfd", "peer 10.9.2.9 local-address 10.9.1.9 interface w0"}
		near.Vtysh(append(nearPeer, "shutdown")...)
		eventually(how[0]+": the far bfdd hears that a session is shut down", func() bool { return up(far) == sessions-1 })
		near.Vtysh(append(nearPeer, "no shutdown")...)
		eventually(how[0]+": and that it is up again", all)
		nearDowns, farDowns = nearDowns+2, farDowns+2
		if n, f := downs(near), downs(far); n > nearDowns || f > farDowns {
			t.Errorf("%s: sessions went down %d times at the near bfdd, and %d times at the far one: want %d and %d", how[0], n, f, nearDowns, farDowns)
		}
	}
	must("stop", "serve.service")
	eventually("both know that nobody runs the sessions", func() bool { return up(near) == 0 && up(far) == 0 })
	eventually("weir reroute status shows none", func() bool { return len(shown()) == 0 })
	must("start", "serve.service")
	eventually("all are up again", all)
}
