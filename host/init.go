// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/user"
	"slices"
	"strings"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/inventory"
	"github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/workload"
)

// Draft is a configuration for the programs found on this host.
type Draft struct {
	Text     []byte
	Found    []string // a line for each program and routing daemon
	LeftOut  []string // suggestions commented out because weir apply would reject them, with the reason
	Unseen   []string // parts of the host hidden from this user, with the remedy
	Replaces []string // outages of any other file: weir has another configuration in force
}

// emptyConfig configures nothing. weir apply rejects an empty file.
const emptyConfig = "services: {}\n"

// Draft reads the host and returns a configuration accepted by weir apply --dry-run on it. Each feature contributes its
// suggestions ([feature.Suggester]).
func (h *Host) Draft(ctx context.Context) (Draft, error) {
	found, err := inventory.Gather(ctx, inventory.Options{Workload: identify})
	if err != nil {
		return Draft{}, fmt.Errorf("read what runs on this host: %w", err)
	}
	return h.draft(ctx, found)
}

// identify returns the unit and the container in the path of a cgroup. Units of users are unknown to the system's
// manager, so they are omitted.
func identify(cgroup string) (unit, container string) {
	n := workload.Identify(cgroup)
	if n.Kind == workload.Container {
		container = strings.TrimSpace(n.Runtime + " " + n.Text)
	}
	if strings.HasPrefix(cgroup, "/user.slice/") {
		return "", container
	}
	return n.Unit, container
}

func (h *Host) draft(ctx context.Context, found inventory.Host) (Draft, error) {
	c := composer{host: found}
	for _, f := range features {
		if s, ok := f.Value.(feature.Suggester); ok {
			c.all = append(c.all, s.Suggest(found)...)
		}
	}
	d := Draft{Found: c.found(), Unseen: found.Unseen}
	before, err := h.rejects(ctx, emptyConfig, nil)
	if err != nil && !unreadable(err) && !errors.Is(err, kernel.ErrUnsupported) {
		return Draft{}, fmt.Errorf("plan an empty configuration: %w", err)
	}
	if err != nil {
		d.Unseen = append(d.Unseen, fmt.Sprintf("the plan of weir apply (%v): only the form of the file was checked", err))
	}
	d.Replaces = before
	h.leaveOut(ctx, &c, before, err == nil)
	for i, s := range c.all {
		if s.Active && c.rejected[i] != "" {
			d.LeftOut = append(d.LeftOut, fmt.Sprintf("%s: %s", s.Service, c.rejected[i]))
		}
	}
	d.Text = []byte(c.text())
	if reason := h.reason(ctx, string(d.Text), before, err == nil); reason != "" {
		return Draft{}, fmt.Errorf("weir apply would reject the written configuration: %s", reason)
	}
	return d, nil
}

// leaveOut finds the active suggestions rejected by weir apply. Usually there are none, and one plan suffices.
func (h *Host) leaveOut(ctx context.Context, c *composer, before []string, plan bool) {
	c.rejected = make([]string, len(c.all))
	if h.reason(ctx, c.text(), before, plan) == "" {
		return
	}
	for i, s := range c.all {
		if s.Active {
			c.rejected[i] = "not tried"
		}
	}
	for i, s := range c.all {
		if s.Active {
			c.rejected[i] = ""
			c.rejected[i] = h.reason(ctx, c.text(), before, plan)
		}
	}
}

// reason returns the reason to reject a configuration, or "".
func (h *Host) reason(ctx context.Context, text string, before []string, plan bool) string {
	if !plan {
		if _, err := ParseConfig("weir.yaml", []byte(text)); err != nil {
			return err.Error()
		}
		return ""
	}
	outages, err := h.rejects(ctx, text, before)
	if err != nil {
		return err.Error()
	}
	return strings.Join(outages, "; ")
}

// rejects plans a configuration. It returns the new outages.
func (h *Host) rejects(ctx context.Context, text string, before []string) ([]string, error) {
	cfg, err := ParseConfig("weir.yaml", []byte(text))
	if err != nil {
		return nil, err
	}
	doc := cfg.Document()
	for _, f := range features {
		if f.Used(doc) {
			if err := kernel.Require(f.Needs(doc)); err != nil {
				return nil, err
			}
		}
	}
	plan, err := h.Plan(ctx, cfg)
	return slices.DeleteFunc(plan.Outages, func(o string) bool { return slices.Contains(before, o) }), err
}

// composer writes a configuration from suggestions.
type composer struct {
	host     inventory.Host
	all      []feature.Suggestion
	rejected []string // by suggestion: the reason to comment it out, "" for none
}

// lines is a part of the file under construction.
type lines struct{ strings.Builder }

// say adds a comment of one line. Comments have a space after the #, and suggestions have none. Names of processes and
// tables are text of strangers.
func (l *lines) say(indent, format string, a ...any) {
	l.WriteString(strings.TrimRight(indent+"# "+printable.Text(fmt.Sprintf(format, a...)), " ") + "\n")
}

// put adds YAML, commented out unless active.
func (l *lines) put(indent, yaml string, active bool) {
	for line := range strings.Lines(yaml) {
		line = strings.TrimSuffix(line, "\n")
		text := strings.TrimLeft(line, " ")
		indent := indent + line[:len(line)-len(text)]
		if !active {
			indent += "#"
		}
		l.WriteString(indent + text + "\n")
	}
}

// active reports whether a suggestion is in force.
func (c *composer) active(i int) bool { return c.all[i].Active && c.rejected[i] == "" }

// explain adds the comment above a suggestion.
func (c *composer) explain(l *lines, indent string, i int) {
	for _, w := range c.all[i].Reason {
		l.say(indent, "%s", w)
	}
	if c.rejected[i] != "" {
		l.say(indent, "Not in force, weir apply rejects it now: %s", printable.OneLine(c.rejected[i]))
	}
}

// text returns the file.
func (c *composer) text() string {
	var l lines
	l.say("", "Configuration of weir, written by weir init for this host.")
	l.say("", "Comments have a space after the #. Suggestions have none: remove their # to use them.")
	l.say("", "weir apply --dry-run -f FILE shows the effect. weir examples shows more configurations.")
	l.WriteString("#\n")
	if found := c.found(); len(found) > 0 {
		l.say("", "Found:")
		for _, f := range found {
			l.say("", "- %s", f)
		}
	} else {
		l.say("", "Nothing found. weir init looks for servers with TCP and UDP sockets, SO_REUSEPORT groups, telemetry collectors,")
		l.say("", "routing daemons (FRR, BIRD), nftables rules and BPF programs of others, in all named network namespaces.")
	}
	for _, u := range c.host.Unseen {
		l.say("", "Not seen: %s", u)
	}
	l.WriteString("\n")
	l.put("", groupKey(user.LookupGroup)+"\n", true) // weir apply rejects a file without keys
	c.services(&l)
	for i, s := range c.all {
		if s.Service == "" {
			l.WriteString("\n")
			c.explain(&l, "", i)
			l.put("", s.Text, c.active(i))
		}
	}
	return l.String()
}

// groupKey returns the key group with its default. Without that group only root has access.
func groupKey(lookup func(string) (*user.Group, error)) string {
	if _, err := lookup(defaultGroup); err != nil {
		return fmt.Sprintf("group: root # only root reads the state of weir; for others: groupadd --system %[1]s, and group: %[1]s", defaultGroup)
	}
	return "group: " + defaultGroup + " # may read the state of weir"
}

// exampleService is the suggestion for a host without suggestions for services.
const exampleService = `telemetry:
  listen: [udp 0.0.0.0:4739, tcp 0.0.0.0:1790]
  steer: {by: source, slots: 2}
  members: [{slot: 0, unit: nfacctd@0.service}, {slot: 1, unit: nfacctd@1.service}]
`

// services adds the section services. Its key is a comment if all services are.
func (c *composer) services(l *lines) {
	of := map[string][]int{} // suggestions by service
	any, active := false, map[string]bool{}
	for i, s := range c.all {
		if s.Service != "" {
			of[s.Service] = append(of[s.Service], i)
			active[s.Service] = active[s.Service] || c.active(i)
			any = any || c.active(i)
		}
	}
	l.WriteString("\n")
	l.put("", "services:\n", any)
	if len(of) == 0 {
		l.say("  ", "An example: two collectors at one address, and all telemetry of a router at one of them.")
		l.put("  ", exampleService, false)
	}
	for _, p := range c.host.Programs {
		if len(of[p.Service]) == 0 {
			continue
		}
		l.say("  ", "%s", describe(p))
		l.put("  ", p.Service+":\n", active[p.Service])
		l.put("    ", "listen:\n", active[p.Service])
		for _, at := range p.Listens {
			l.put("      ", "- "+at.String()+"\n", active[p.Service])
		}
		if p.Netns != "" {
			l.put("    ", "netns: "+feature.Scalar(p.Netns)+"\n", active[p.Service])
		}
		for _, i := range of[p.Service] {
			c.explain(l, "    ", i)
			l.put("    ", c.all[i].Text, c.active(i))
		}
	}
}

// describe returns a program with its instances and sockets, in one line.
func describe(p inventory.Program) string {
	var who, at []string
	for _, i := range p.Instances {
		who = append(who, i.String())
	}
	for _, l := range p.Listens {
		at = append(at, l.String())
	}
	text := fmt.Sprintf("%s, %s: %s; listens at %s", p.Name, p.Role, strings.Join(who, ", "), strings.Join(at, ", "))
	if n := len(p.Instances); n > 1 {
		text += fmt.Sprintf("; %d processes at one address (SO_REUSEPORT)", n)
	} else if n := p.Sockets(); n > 1 {
		text += fmt.Sprintf("; %d sockets at one address (SO_REUSEPORT)", n)
	}
	if p.Netns != "" {
		text += "; network namespace " + p.Netns
	}
	return text
}

// found returns a line for each program, and lines for routing daemons, rules and programs of others.
func (c *composer) found() (out []string) {
	for _, p := range c.host.Programs {
		out = append(out, describe(p))
	}
	for _, n := range c.host.Namespaces {
		in := ""
		if n.Name != "" {
			in = " in network namespace " + n.Name
		}
		if len(n.Routing) > 0 {
			out = append(out, "routing"+in+": "+suite(n.Routing))
		}
		if n.FRR != nil {
			for _, p := range n.FRR.Peers {
				out = append(out, strings.TrimSpace(fmt.Sprintf("BFD neighbour of FRR%s: %s %s", in, p.Addr, p.Interface)))
			}
		}
		if n.Rules != nil {
			text := fmt.Sprintf("nftables%s: %s in %s", in, printable.Count(n.Rules.Count, "rule"), strings.Join(n.Rules.Tables, ", "))
			if len(n.Rules.Limits) > 0 {
				text += "; limits of UDP in " + strings.Join(n.Rules.Limits, ", ")
			}
			out = append(out, text)
		}
		for _, p := range n.Hooked {
			out = append(out, fmt.Sprintf("BPF program at %s%s: %s", p.Hook, in, p.Program))
		}
	}
	return out
}

// suite names routing daemons with their suite.
func suite(daemons []string) string {
	name := ""
	switch {
	case slices.Contains(daemons, "zebra"):
		name = "FRR: "
	case slices.ContainsFunc(daemons, func(d string) bool { return strings.HasPrefix(d, "bird") }):
		name = "BIRD: "
	}
	return name + strings.Join(daemons, ", ")
}

// WriteNew writes a new file, and never replaces one.
func (d Draft) WriteNew(path string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if errors.Is(err, os.ErrExist) {
		return fmt.Errorf("%s exists and stays as it is: name another file with -o FILE, or print the configuration with --stdout", path)
	}
	if err != nil {
		return fmt.Errorf("write the configuration: %w; name another file with -o FILE, or print it with --stdout", err)
	}
	_, err = f.Write(d.Text)
	if err = errors.Join(err, f.Close()); err != nil {
		os.Remove(path) // a part of a configuration may do the opposite of the whole
		return fmt.Errorf("write the configuration: %w", err)
	}
	return nil
}
