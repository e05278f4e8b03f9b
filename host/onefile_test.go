// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature/handoff/backend"
	"github.com/weir-project/weir/feature/handoff/lb"
	"github.com/weir-project/weir/feature/handoff/peer/peertest"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// sectionsOfHandoff extend everyFeature with the load balancer and a backend of its own.
const sectionsOfHandoff = `
handoff:
  keeper: {hold: 20s}
  backend:
    name: s1
    number: 1
    address: 10.77.0.9
    listen: 127.0.0.1:7957
    lb: {address: 127.0.0.1:7956}
    tls: {certificate: %s, key: %s, ca: %s}
    devices: [d0]
lb:
  devices: [d1]
  listen: 127.0.0.1:7956
  tls: {certificate: %s, key: %s, ca: %s}
  services:
    talk: {number: 0, listen: [tcp 10.55.0.1:9000]}
  register: true
`

// One file with every feature runs under one weir serve. It appears in status, metrics and doctor, survives a wrong
// file, and is removed by one command.
func TestOneFile(t *testing.T) {
	countFromBoot(t)
	w, _, pid := damagedWorld(t) // it has agents of its own, to be removed first
	if err := w.Remove(t.Context(), "", true); err != nil {
		t.Fatal(err)
	}
	second, _ := daemon(t, "0.0.0.0:4741")
	dir := socketDir(t)
	key, path := filepath.Join(dir, "key"), filepath.Join(dir, "weir.yaml")
	write := func(file, text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(key, "0123456789abcdef")
	ca := peertest.NewAuthority(t)
	cert1, key1, root := ca.Files("s1")
	cert2, key2, _ := ca.Files("lb")
	text := fmt.Sprintf(strings.ReplaceAll(everyFeature, "4740", "4741")+sectionsOfHandoff, pid, second, key, cert1, key1, root, cert2, key2, root)
	write(path, text)
	reload := make(chan struct{})
	s := w.serveWith(dir, ServeOptions{File: path, Reload: reload})
	agent := func() (st backend.Status) {
		st, _ = backend.StatusHere(t.Context()) // zero if the agent does not answer
		return st
	}
	all := func() bool {
		st, err := w.Reader(s.socket).Status(t.Context())
		r, _ := Part[lb.Report](st, lb.Name)
		b, _ := Part[backend.Report](st, backend.Name)
		shown := st.Shown()
		return err == nil && !slices.ContainsFunc(Features(), func(f string) bool { return !slices.Contains(shown, f) }) && len(r.Balancers) == 1 &&
			r.Balancers[0].Agent && len(r.Balancers[0].Backends) == 1 && r.Balancers[0].Backends[0].Connected && b.Agent != nil && b.Agent.LB && b.Agent.Keeper
	}
	var page string
	nstest.Eventually(t, func() error { // an agent on a busy machine may answer too late
		if code, body := s.get("/healthz"); code != 200 || !all() {
			return fmt.Errorf("all runs %t, /healthz: %d %s", all(), code, body)
		}
		_, page = s.get("/metrics")
		if lacks := lackedMetrics(page, `weir_lb_agent_up{lb="lb"} 1`, `weir_backend_agent_up 1`, `weir_backend_connected{agent="load balancer"} 1`, `weir_filter_up 1`, `weir_healthy 1`); len(lacks) > 0 {
			return fmt.Errorf("/metrics lacks %q", lacks)
		}
		for _, f := range w.Doctor(t.Context()).Findings {
			if strings.Contains(f.Text, "does not answer") {
				return fmt.Errorf("doctor: %+v", f)
			}
		}
		return nil
	})
	checkMetrics(t, page)
	for _, name := range []string{"d0", "d1"} {
		if l, err := netlink.LinkByName(name); err != nil || netlink.LinkDel(l) != nil {
			t.Fatal(name, err)
		}
	}
	nstest.Eventually(t, func() error {
		if code, body := s.get("/healthz"); code != 503 || !strings.Contains(body, "there is no such interface") {
			return fmt.Errorf("devices are gone: /healthz: %d %s", code, body)
		}
		return nil
	})
	makeDevices(t)
	nstest.Eventually(t, func() error {
		if code, body := s.get("/healthz"); code != 200 || !all() {
			return fmt.Errorf("devices were made again, all runs %t, /healthz: %d %s", all(), code, body)
		}
		return nil
	})
	write(path, strings.Replace(text, "number: 1\n", "number: 5000\n", 1))
	reload <- struct{}{}
	reload <- struct{}{} // the first reload is over
	if !strings.Contains(s.log.String(), "number 5000: set a unique number") {
		t.Errorf("after a wrong file: %+v\n%s", agent(), s.log)
	}
	nstest.Until(t, "everything runs after a wrong file", all)
	write(path, strings.Replace(text, "number: 1\n", "number: 1\n    weight: 3\n", 1))
	reload <- struct{}{}
	nstest.Until(t, "the backend has its new weight", func() bool {
		st, err := w.Reader(s.socket).Status(t.Context())
		r, _ := Part[lb.Report](st, lb.Name)
		return err == nil && len(r.Balancers) == 1 && len(r.Balancers[0].Backends) == 1 && r.Balancers[0].Backends[0].Weight == 3
	})
	if err := w.Remove(context.Background(), "", true); err != nil {
		t.Fatal(err)
	}
	nstest.Until(t, "the agents have ended", func() bool { return agent().Backend == "" })
	if left, err := w.Root.Instances(""); err != nil || len(left) > 0 {
		t.Errorf("%v is left, %v", left, err)
	}
	if err := kernel.OpenRoot(w.Root.Path()).Usable(); err != nil {
		t.Error(err)
	}
}
