// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/pidfd"
	"github.com/weir-project/weir/internal/safefile"
	"github.com/weir-project/weir/internal/sockdiag"
	"github.com/weir-project/weir/internal/units"
)

// process is a running process.
type process struct {
	pid, ppid int
	name      string
	netns     uint64 // inode number; 0: hidden from this user
	cgroup    string
}

// processes reads all processes visible to this user.
func (g *gatherer) processes() {
	g.all = map[int]process{}
	for _, pid := range pidfd.All() {
		p, err := pidfd.Open(pid)
		if err != nil {
			continue // it has exited
		}
		info, err := p.Info()
		p.Close()
		if err != nil {
			continue
		}
		one := process{pid: pid, ppid: info.PPID, name: info.Comm, cgroup: cgroupOf(pid)}
		if link, err := pidfd.Readlink(pid, "ns/net"); err == nil {
			one.netns, _ = strconv.ParseUint(strings.TrimSuffix(strings.TrimPrefix(link, "net:["), "]"), 10, 64)
		}
		g.all[pid] = one
	}
}

// cgroupOf returns the path of a process in the cgroup2 hierarchy, "" if unknown.
func cgroupOf(pid int) string {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(text)) {
		if path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
			return path
		}
	}
	return ""
}

// listener is a socket with its processes.
type listener struct {
	listen Listen
	inode  uint32
}

// readListeners lists the TCP listeners and the unconnected UDP sockets of the calling thread's namespace. Ports for
// clients are omitted over UDP: the kernel chose them.
func readListeners() (out []listener, err error) {
	from, to := clientPorts()
	for _, q := range []sockdiag.Query{{Proto: unix.IPPROTO_TCP, States: 1 << sockdiag.Listen}, {Proto: unix.IPPROTO_UDP, States: 1 << sockdiag.Close}} {
		socks, err := sockdiag.Dump(q)
		if err != nil {
			return nil, err
		}
		for _, s := range socks {
			l := Listen{Proto: "tcp", Local: s.Local, Only6: s.V6Only}
			if q.Proto == unix.IPPROTO_UDP {
				l.Proto = "udp"
			}
			port, addr := s.Local.Port(), s.Local.Addr()
			if port == 0 || l.Proto == "udp" && port >= from && port <= to || addr.IsLinkLocalUnicast() || addr.IsMulticast() || addr.Is4In6() {
				continue
			}
			out = append(out, listener{l, s.Inode})
		}
	}
	return out, nil
}

// clientPorts returns the range for sockets without a chosen port.
func clientPorts() (from, to uint16) {
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if n, _ := fmt.Sscan(string(text), &from, &to); err != nil || n != 2 {
		return 32768, 60999
	}
	return from, to
}

func compareListens(a, b Listen) int {
	return cmp.Or(-cmp.Compare(a.Proto, b.Proto), cmp.Compare(a.Local.Port(), b.Local.Port()), a.Local.Addr().Compare(b.Local.Addr()))
}

// addPrograms groups the sockets of a namespace by instance, and equal instances by program.
func (g *gatherer) addPrograms(ns string, all []listener) {
	var inodes []uint32
	for _, l := range all {
		inodes = append(inodes, l.inode)
	}
	holders := pidfd.Holders(inodes...)
	files := pidFiles()
	listens := map[int]map[Listen]int{} // by topmost process: number of sockets
	var hidden []string
	for _, l := range all {
		top := g.topmost(holders[l.inode])
		if top == 0 {
			if at := l.listen.String(); !slices.Contains(hidden, at) {
				hidden = append(hidden, at)
			}
			continue
		}
		if listens[top] == nil {
			listens[top] = map[Listen]int{}
		}
		listens[top][l.listen]++
	}
	if len(hidden) > 0 {
		slices.Sort(hidden)
		g.unseen("processes behind %s in network namespace %s: run weir init as root, outside containers", strings.Join(hidden, ", "), cmp.Or(ns, "(own)"))
	}
	groups := map[string]*Program{}
	for pid, sockets := range listens {
		p := g.all[pid]
		one := Instance{PID: pid, Cgroup: g.ownCgroup(p), PIDFile: cmp.Or(files[pid], namedPIDFile(p.name, pid))}
		if g.Workload != nil {
			one.Unit, one.Container = g.Workload(p.cgroup)
		}
		var at []Listen
		for l, n := range sockets {
			at = append(at, l)
			one.Sockets = max(one.Sockets, n)
		}
		slices.SortFunc(at, compareListens)
		key := p.name + fmt.Sprint(at)
		if groups[key] == nil {
			groups[key] = &Program{Name: p.name, Netns: ns, Role: roleOf(p.name, at), Listens: at}
		}
		groups[key].Instances = append(groups[key].Instances, one)
	}
	for _, p := range groups {
		slices.SortFunc(p.Instances, func(a, b Instance) int {
			return cmp.Or(cmp.Compare(a.Unit, b.Unit), cmp.Compare(a.PIDFile, b.PIDFile), cmp.Compare(a.PID, b.PID))
		})
		g.host.Programs = append(g.host.Programs, *p)
	}
}

// topmost returns the process among the holders of a socket with none of the others as its ancestor; 0: none is
// visible. A unit's manager keeps its sockets too: process 1 counts only if it is alone.
func (g *gatherer) topmost(holders []int) int {
	holders = slices.DeleteFunc(slices.Clone(holders), func(pid int) bool { return g.all[pid].pid == 0 })
	if len(holders) > 1 {
		holders = slices.DeleteFunc(holders, func(pid int) bool { return pid == 1 })
	}
	if len(holders) == 0 {
		return 0
	}
	pid := slices.Min(holders)
	for slices.Contains(holders, g.all[pid].ppid) {
		pid = g.all[pid].ppid
	}
	// Workers with sockets of their own belong to their parent, a process of the same program.
	for parent := g.all[g.all[pid].ppid]; parent.pid > 1 && parent.name == g.all[pid].name; parent = g.all[parent.ppid] {
		pid = parent.pid
	}
	return pid
}

// ownCgroup returns the cgroup of a process if other programs do not share it. Cgroups of logins are omitted: they end
// with them.
func (g *gatherer) ownCgroup(p process) string {
	if p.cgroup == "" || p.cgroup == "/" || strings.HasPrefix(p.cgroup, "/..") || strings.HasPrefix(p.cgroup, "/user.slice/") {
		return ""
	}
	for _, o := range g.all {
		if o.cgroup == p.cgroup && o.pid != p.pid && o.ppid != p.pid && o.name != p.name {
			return ""
		}
	}
	return p.cgroup
}

// PIDFileSources describes the pidfiles known to this package.
const PIDFileSources = "/run/*.pid, /run/*/*.pid, its option --pidfile, and for nfacctd, sfacctd and pmacctd pidfile: in " + pmacctFiles

// pmacctFiles are the configurations of pmacct in Debian.
const pmacctFiles = "/etc/pmacct/*.conf"

// pidFiles returns the usual files with the PID of a daemon, by PID.
func pidFiles() map[int]string {
	out := map[int]string{}
	for _, pattern := range []string{"/run/*.pid", "/run/*/*.pid"} {
		files, _ := filepath.Glob(pattern) // the patterns are valid
		for _, f := range files {
			if pid, err := units.ReadPIDFile(f); err == nil && out[pid] == "" {
				out[pid] = f
			}
		}
	}
	return out
}

// pmacct are the daemons with configurations like nfacctd's.
var pmacct = []string{"nfacctd", "sfacctd", "pmacctd"}

// maxConfiguration bounds a daemon's configuration, in bytes.
const maxConfiguration = 1 << 20

// namedPIDFile returns the file with the PID of a daemon named by its options or its configuration; "": none.
func namedPIDFile(name string, pid int) string {
	args, err := pidfd.CommandLine(pid)
	if err != nil {
		return ""
	}
	named := []string{option(args, "--pidfile"), option(args, "--pid-file")}
	switch {
	case slices.Contains(pmacct, name):
		named = append(named, option(args, "-F"))
		files, _ := filepath.Glob(pmacctFiles)                // the pattern is valid
		for _, f := range append(files, option(args, "-f")) { // the daemon usually overwrites its arguments with a title
			if c, err := safefile.Read(f, maxConfiguration); err == nil {
				named = append(named, pmacctKey(string(c.Data), "pidfile"))
			}
		}
	case name == "nfcapd":
		named = append(named, option(args, "-P"))
	}
	for _, file := range named {
		if !filepath.IsAbs(file) {
			continue
		}
		if is, err := units.ReadPIDFile(file); err == nil && is == pid {
			return file
		}
	}
	return ""
}

// pmacctKey returns the value of a key in a configuration of pmacct: "key: value", with ! before comments.
func pmacctKey(text, key string) string {
	for line := range strings.Lines(text) {
		k, value, _ := strings.Cut(line, ":")
		if strings.TrimSpace(k) == key {
			return strings.TrimSpace(value)
		}
	}
	return ""
}
