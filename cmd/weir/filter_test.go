// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/filter"
	"github.com/weir-project/weir/internal/nstest"
)

// A filter from the configuration file to its removal, through the command line.
func TestFilterCommands(t *testing.T) {
	s := session{t, root(t)}
	w := nstest.NewWire(t)
	file := filepath.Join(t.TempDir(), "weir.yaml")
	write := func(port int) {
		t.Helper()
		text := fmt.Sprintf(`filter:
  - name: dns
    hook: nft
    netns: %s
    rules:
      - {name: all, match: udp, action: count}
      - {match: 'udp.dstport == %d', action: drop}
  - {name: late, hook: tcx, netns: %s, interfaces: [nowhere], rules: [{match: udp, action: drop}]}
`, w.NameB, port, w.NameB)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(5001)
	s.run(0, "no filters: .* weir apply .*", "filter", "list")
	s.run(0, `would create filter dns: 2 rules at nft input, priority 0, in wire\d+-b\nwould create filter late: 1 rule at tcx ingress of nowhere, in wire\d+-b\nwarning: filter late in wire.*: there is no interface nowhere: .*`,
		"apply", "-f", file, "--dry-run")
	s.run(0, "no filters: .*", "filter", "list")
	s.run(0, `create filter dns: .*\ncreate filter late: .*`, "apply", "-f", file)
	s.run(0, "nothing to change\nwarning: .*", "apply", "-f", file)
	from, to := nstest.ListenUDP(t, w.A, netip.AddrPortFrom(w.A4, 0)), nstest.ListenUDP(t, w.B, netip.AddrPortFrom(w.B4, 5001))
	if nstest.Arrives(t, from, to, false) {
		t.Error("a datagram passes the filter")
	}
	// A packet may arrive later.
	nstest.Eventually(t, func() error {
		out, errs, _ := weir(t, "--root", s.root, "filter", "list")
		if !regexp.MustCompile(`all +count +1 `).MatchString(out) {
			return errors.New(out + errs)
		}
		return nil
	})
	s.run(0, `dns: hook nft, default pass, in wire\d+-b\n  at nftables table inet weir_dns, input, priority 0\n`+
		`  RULE +ACTION +PACKETS +BYTES +LAST MATCH +MATCH\n  all +count +1 +41 B +\d+s ago +udp\n  2 +drop +1 +41 B +\d+s ago +udp.dstport == 5001\n  default +pass +0 +0 B +never +no rule decided\n`+
		`\nlate: .*\n  ! tcx ingress of nowhere: there is no interface nowhere: .*`, "filter", "list")
	s.run(0, `dns: .*`, "filter", "list", "dns")
	s.run(1, `weir: no filter "x": .*`, "filter", "list", "x")
	var st filter.State
	if err := json.Unmarshal([]byte(s.run(0, `.*`, "filter", "list", "--json")), &st); err != nil {
		t.Fatal(err)
	}
	if r := st.Filters[0].Rules; len(st.Filters) != 2 || r[1].Packets != 1 || r[1].Action != filter.Drop || time.Since(r[1].Last) > time.Minute || r[0].Name != "all" {
		t.Errorf("list --json: %+v", st)
	}
	s.run(0, `FILTER +HOOK +RULES +DROPPED +LAST DROP +NETNS\ndns +nft +2 +1 +\d+s ago +wire\d+-b\nlate +tcx +1 +0 +never +wire\d+-b\n! late: .*`, "status")
	var all struct {
		Filter filter.State
	}
	if err := json.Unmarshal([]byte(s.run(0, `.*`, "status", "--json")), &all); err != nil || len(all.Filter.Filters) != 2 {
		t.Errorf("status --json: %v, %+v", err, all)
	}
	s.run(0, `(?s).*failure: filter late: tcx ingress of nowhere: there is no interface nowhere.*`, "doctor")
	write(5002)
	s.run(0, `change filter dns: added udp.dstport == 5002; removed udp.dstport == 5001\nwarning: .*`, "apply", "-f", file)
	if !nstest.Arrives(t, from, to, true) {
		t.Error("a datagram does not pass the changed filter")
	}
	s.run(0, "nothing to upgrade: .*", "upgrade")
	s.run(0, "", "remove", "filter")
	s.run(0, "no filters: .*", "filter", "list")
	if left := s.pins(); left != "" {
		t.Errorf("removed, and there is still %s", left)
	}
}

// apply prints its own warnings, also warnings missing from a plan made afterwards.
func TestApplyWarnsOfTheChange(t *testing.T) {
	s := session{t, root(t)}
	w := nstest.NewWire(t)
	dir := t.TempDir()
	file, list := filepath.Join(dir, "weir.yaml"), filepath.Join(dir, "list.txt")
	text := fmt.Sprintf("filter: [{name: block, hook: nft, netns: %s, lists: {bad: list.txt}, rules: [{match: 'ip.src in $bad', action: drop}]}]\n", w.NameB)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(list, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("192.0.2.7\n")
	s.run(0, "create filter block: .*", "apply", "-f", file)
	write("")
	_, errs, status := weir(t, "--root", s.root, "apply", "-f", file)
	if want := "warning: filter block: list bad is empty"; status != 0 || strings.Count(errs, want) != 1 {
		t.Errorf("apply of an emptied list: status %d, %q; want %q once", status, errs, want)
	}
}

// A capture is read once for all filters, also from standard input. Of a truncated capture the complete packets are
// shown, and the status is 1.
func TestFilterTest(t *testing.T) {
	s := session{t, root(t)}
	dir := t.TempDir()
	config, capture := filepath.Join(dir, "weir.yaml"), filepath.Join(dir, "x.pcap")
	text := "filter:\n  - {name: a, hook: nft, rules: [{match: udp, action: drop}]}\n  - {name: b, hook: nft, rules: [{match: tcp, action: drop}]}\n"
	header := "\xd4\xc3\xb2\xa1\x02\x00\x04\x00" + strings.Repeat("\x00", 8) + "\x00\x00\x04\x00\x65\x00\x00\x00" // raw IP
	ip := "\x45\x00\x00\x1c\x00\x00\x00\x00\x40\x11\x00\x00\x0a\x00\x00\x01\x0a\x00\x00\x02\x00\x35\x00\x35\x00\x08\x00\x00"
	one := strings.Repeat("\x00", 8) + "\x1c\x00\x00\x00\x1c\x00\x00\x00" + ip
	for file, text := range map[string]string{config: text, capture: header + one + one, capture + ".cut": header + one + one[:20], capture + ".snap": header + one + strings.Repeat("\x00", 8) + "\x16\x00\x00\x00\x1c\x00\x00\x00" + ip[:22] + strings.Repeat("\x00", 16),
		filepath.Join(dir, "nets"): "10.0.0.0/8\n"} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s.run(0, `filter a\n2 packets, by the kernel\n.*\n1 +drop +2 .*\ndefault +pass +0 .*\n\nfilter b\n2 packets, by the kernel\n.*\n1 +drop +0 .*\ndefault +pass +2 .*`, "filter", "test", "--rules", config, "-r", capture)
	s.run(0, `2 packets, by the kernel\nRULE.*\n1 +count +2 +56 B +udp\n2 +count +0 +0 B +tcp\n`, "filter", "test", "udp", "tcp", "-r", capture)
	s.run(0, `2 packets, by the kernel \(2 by the interpreter, because the kernel rejects them\)\nRULE.*\n1 +count +2 +56 B +udp or eth\n`, "filter", "test", "udp or eth", "-r", capture)
	s.run(0, `(?s).* 2 +56 B +ip.src in \$nets\n`, "filter", "test", "ip.src in $nets", "--list", "nets="+filepath.Join(dir, "nets"), "-r", capture)
	s.run(1, `(?s)1 packet, .* 1 +28 B +udp\nweir: .*x.pcap.cut: the capture is cut short: packet 2 is incomplete\n`, "filter", "test", "udp", "-r", capture+".cut")
	s.run(0, `3 packets, by the kernel \(2 by the interpreter.*\)\n1 packet cut by .*: lengths are those on the wire\n1 packet undecided: .*tcpdump -s 0\)\n1 empty record: .*\n`+
		`RULE +ACTION +PACKETS +BYTES +UNDECIDED +MATCH\n1 +count +1 +28 B +1 +udp.dstport == 53\n2 +count +2 +56 B +0 +ip.len == 28\n`, "filter", "test", "udp.dstport == 53", "ip.len == 28", "-r", capture+".snap")
	s.run(2, `weir: column 1: there is no list "nets": name its file, .*`, "filter", "test", "ip.src in $nets", "-r", capture)
	stdin, err := os.Open(capture)
	if err != nil {
		t.Fatal(err)
	}
	defer stdin.Close()
	c := command("--root", s.root, "filter", "test", "--rules", config, "-r", "-")
	c.Stdin = stdin
	if out, errs, status := finish(t, c); status != 0 || strings.Count(out, "2 packets, by the kernel") != 2 {
		t.Errorf("from standard input: status %d, %s%s", status, out, errs)
	}
}

// pins lists the pins.
func (s session) pins() string {
	var out strings.Builder
	filepath.WalkDir(s.root, func(path string, _ os.DirEntry, err error) error {
		if err == nil {
			out.WriteString(path + " ")
		}
		return nil
	})
	return out.String()
}
