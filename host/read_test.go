// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/weir-project/weir/feature/steer"
	"github.com/weir-project/weir/feature/steer/bindings"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
)

// answers is the output of playRead.
type answers struct {
	Reader  string
	Status  *state.State
	Devices *steer.DeviceReport
	Where   *steer.WhereReport
	Bound   []bindings.Binding
	Named   []bindings.Named
	Errors  []string
}

// playRead sends all queries of a reader as the current user.
func playRead(f []string) error {
	return json.NewEncoder(os.Stdout).Encode(readAll(New(f[0]).Reader(f[1])))
}

func readAll(r Reader) answers {
	a := answers{Reader: fmt.Sprintf("%T", r)}
	keep := func(err error) {
		if err != nil {
			a.Errors = append(a.Errors, err.Error())
		}
	}
	ctx := context.Background()
	if st, err := r.Status(ctx); err == nil {
		st, _ := Part[state.State](st, spec.Name)
		a.Status = &st
	} else {
		keep(err)
	}
	if d, err := Ask[steer.DeviceReport](ctx, r, spec.Name, "devices", nil); err == nil {
		a.Devices = &d
	} else {
		keep(err)
	}
	what := state.WhatIf{Slots: 3, Without: []int{0, 2}}
	if p, err := Ask[steer.WhereReport](ctx, r, spec.Name, "where", what.Values("telemetry", []string{"127.0.0.5", "2001:db8::1"})); err == nil {
		a.Where = &p
	} else {
		keep(err)
	}
	var scope string
	if ns, err := netns.Current(); err == nil {
		scope = strconv.FormatUint(ns.Inode(), 10)
		ns.Close()
	}
	var err error
	a.Bound, err = Ask[[]bindings.Binding](ctx, r, spec.Name, "bindings", url.Values{"netns": {scope}})
	keep(err)
	a.Named, err = Ask[[]bindings.Named](ctx, r, spec.Name, "services", url.Values{"netns": {scope}})
	keep(err)
	_, err = Ask[steer.DeviceReport](ctx, r, spec.Name, "devices", url.Values{"service": {"absent"}})
	keep(err)
	return a
}

// readAs reads as another user.
func (w world) readAs(cred syscall.Credential, socket string) answers {
	w.t.Helper()
	c := child("read", w.Root.Path(), socket)
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &cred}
	out, err := c.Output()
	if err != nil {
		w.t.Fatalf("%v: %s", err, out)
	}
	var a answers
	if err := json.Unmarshal(out, &a); err != nil {
		w.t.Fatalf("%v: %s", err, out)
	}
	return a
}

// bind binds UDP port 53 of a prefix to a service.
func (w world) bind(service, prefix string) {
	w.t.Helper()
	ns, err := netns.Current()
	if err != nil {
		w.t.Fatal(err)
	}
	defer ns.Close()
	l, err := w.Root.Lock(context.Background())
	if err != nil {
		w.t.Fatal(err)
	}
	defer l.Unlock()
	if _, err := bindings.Bind(l, ns, bindings.Binding{Service: service, Prefix: netip.MustParsePrefix(prefix), Proto: syscall.IPPROTO_UDP, Port: 53}); err != nil {
		w.t.Fatal(err)
	}
}

// A user without access to the pins gets the same answers from weir serve if in the group. Otherwise the error names the
// users with access.
func TestReaderFallsBackToTheSocket(t *testing.T) {
	w := newWorld(t)
	pid, _ := daemon(t, "0.0.0.0:4739")
	w.apply(w.config(oneService, pid))
	w.bind("telemetry", "127.20.0.0/16")
	w.setGroup(readers)
	heard(t, "127.0.0.5:0", "127.0.0.1:4739")
	s := w.serve()
	own := readAll(w.Reader(s.socket))
	if own.Reader != "host.pins" || len(own.Errors) != 1 || len(own.Devices.Devices) != 1 || len(own.Where.Addresses) != 2 ||
		len(own.Bound) != 1 || len(own.Named) != 1 || own.Named[0].Bindings != 1 {
		t.Fatalf("root reads %+v", own)
	}
	// Only root may search the tests' bpffs, as if the kernel refused.
	theirs := w.readAs(syscall.Credential{Uid: nobody, Gid: readers}, s.socket)
	if theirs.Reader != "host.remote" {
		t.Errorf("the group reads by %s", theirs.Reader)
	}
	if want := "weir serve: " + own.Errors[0]; len(theirs.Errors) != 1 || theirs.Errors[0] != want {
		t.Errorf("the group has errors %v, want %s", theirs.Errors, want)
	}
	own.Status.Services[0].Updated = theirs.Status.Services[0].Updated // time of the query
	for what, pair := range map[string][2]any{"status": {theirs.Status, own.Status}, "devices": {theirs.Devices, own.Devices}, "where": {theirs.Where, own.Where},
		"bindings": {theirs.Bound, own.Bound}, "services": {theirs.Named, own.Named}} {
		if got, want := shown(pair[0]), shown(pair[1]); got != want {
			t.Errorf("%s over the socket:\n%s\nfrom the pins:\n%s", what, got, want)
		}
	}
	stranger := w.readAs(syscall.Credential{Uid: nobody, Gid: nobody}, s.socket)
	for _, e := range stranger.Errors {
		if !strings.Contains(e, "no permission to read weir's pins") || !strings.Contains(e, fmt.Sprintf("; and weir serve answers only root and group %d on %s: permission denied", readers, s.socket)) {
			t.Errorf("a stranger is told %q", e)
		}
	}
	if len(stranger.Errors) != 6 {
		t.Errorf("a stranger reads %+v", stranger)
	}
}

// A member of the group cannot open pins. It asks weir serve, which also enters namespaces.
func TestGroupAsksServe(t *testing.T) {
	w := newWorld(t)
	if err := os.Chmod(nstest.BPFFS, 0o711); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Chmod(nstest.BPFFS, 0o700) })
	pid, _ := daemon(t, "0.0.0.0:4739")
	w.apply(w.config(oneService, pid))
	w.setGroup(readers)
	member := syscall.Credential{Uid: nobody, Gid: readers}
	alone := w.readAs(member, filepath.Join(socketDir(t), "absent.sock"))
	if len(alone.Errors) == 0 || !strings.Contains(alone.Errors[0], "run as root, or ask a running 'weir serve'") {
		t.Errorf("alone the group is told %q", alone.Errors)
	}
	s := w.serve()
	if served := w.readAs(member, s.socket); served.Reader != "host.remote" || served.Status.Services[0].Problem != "" {
		t.Errorf("the group reads by %s: %q", served.Reader, served.Status.Services[0].Problem)
	}
}

// shown is JSON without milliseconds, because two clock readings differ.
func shown(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		return err.Error()
	}
	return regexp.MustCompile(`"(since|first_seen|last_seen|last_udp|updated)":"[^"]*"|"udp_packets_per_second":[^,}]*`).ReplaceAllString(string(b), "$1")
}
