// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/weir-project/weir/cmd/weir/cli"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/host"
	fmt "github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/kernel"
)

// steerReport is the output of weir steer status --json.
type steerReport struct {
	Faults []kernel.Fault `json:"faults,omitempty"`
	state.State
}

// summarizeSteer prints steering's part of weir status. On an empty host it names weir init, unless another feature prints
// something or the pins are damaged.
func summarizeSteer(w io.Writer, st host.Status, others bool, _ time.Time) {
	s, _ := host.Part[state.State](st, spec.Name)
	// Lost and unreadable pins may hold services. A proposal to begin anew would hide the remedy of the fault.
	unseen := slices.ContainsFunc(st.Faults, kernel.Fault.Damage)
	switch empty := len(s.Services)+len(s.Bound) == 0; {
	case empty && !others && !unseen && len(s.Unreadable) == 0:
		cli.Note(w, "no services, guards, filters, paths or sessions yet: weir init writes a first weir.yaml, and weir apply -f weir.yaml applies it\n")
		printOutdated(w, s.Outdated)
	case !empty || !others && !unseen:
		printSummary(w, s)
	}
}

// maxUnserved bounds the services without a socket in the summary.
const maxUnserved = 10

func printSummary(w io.Writer, st state.State) {
	for _, b := range st.Bound {
		cli.Note(w, "%s in %s: weir bind list, weir steer services\n", fmt.Count(b.Bindings, "binding"), b.Netns)
		for i, u := range b.Unserved {
			if i == maxUnserved {
				cli.Note(w, "! and %d more services without a socket: weir steer services\n", len(b.Unserved)-i)
				break
			}
			cli.Note(w, "! %s: %s: %s\n", u.Service, u.Text(b.Netns), u.Remedy())
		}
	}
	if len(st.Services) == 0 {
		if len(st.Bound)+len(st.Unreadable) == 0 {
			cli.Note(w, "no services: weir init suggests some, and weir apply -f weir.yaml applies them\n")
		}
		printOutdated(w, st.Outdated)
		return
	}
	printServices(w, st.Services)
	for _, s := range st.Services {
		if s.Problem != "" {
			cli.Note(w, "! %s: %s\n", s.Name, s.Problem)
		}
		for _, line := range notes(s) {
			cli.Note(w, "! %s: %s\n", s.Name, line)
		}
		cli.PrintBeside(w, s.Name, s.Positions()...)
	}
	printOutdated(w, st.Outdated)
}

// printServices prints one line for each service.
func printServices(w io.Writer, services []state.Service) {
	type row struct {
		Name    string       `table:"SERVICE"`
		Listen  string       `table:"LISTEN"`
		Slots   int          `table:"SLOTS"`
		Empty   string       `table:"EMPTY,dash"`
		OnEmpty spec.OnEmpty `table:"ON EMPTY"`
		Netns   string       `table:"NETNS"`
	}
	var rows []row
	for _, s := range services {
		var empty []string
		for _, slot := range s.Slots {
			if !slot.Admitted() {
				empty = append(empty, fmt.Sprint(slot.Slot))
			}
		}
		text := strings.Join(empty, ",")
		switch { // beside the number of slots, a bare 0 looks like a count
		case len(empty) == 1:
			text = "slot " + text
		case len(empty) > 1:
			text = "slots " + text
		}
		rows = append(rows, row{s.Name, strings.Join(s.Listen, ", "), len(s.Slots), text, s.OnEmpty, s.Netns})
	}
	cli.PrintRows(w, rows, time.Time{})
}

// printSteer prints services in detail.
func printSteer(w io.Writer, services []state.Service, now time.Time) {
	for i, s := range services {
		if i > 0 {
			fmt.Fprintln(w)
		}
		cli.Note(w, "%s: %s by %s\n  engine %s, on_empty %s, seed %d, in %s\n",
			s.Name, strings.Join(s.Listen, ", "), s.By, s.Engine, s.OnEmpty, s.Seed, s.Netns)
		if s.Problem != "" {
			cli.Note(w, "  ! %s\n", s.Problem)
		}
		for _, line := range notes(s) {
			cli.Note(w, "  ! %s\n", line)
		}
		for _, p := range s.Positions() {
			cli.Note(w, "  at %s: %s\n", p.Hook, p)
		}
		printSlots(w, s, now)
		for _, slot := range s.Slots {
			printDraining(w, slot, now)
			if slot.Reason != "" {
				cli.Note(w, "  %s\n", slot.Describe())
			}
		}
		printCopies(w, s.Copies)
		printMoves(w, s)
	}
}

// printSlots prints one line for each slot of a service.
func printSlots(w io.Writer, s state.Service, now time.Time) {
	type row struct {
		Slot     int       `table:"SLOT"`
		State    string    `table:"STATE"`
		Since    time.Time `table:"SINCE"`
		PID      string    `table:"PID,dash"`
		Member   string    `table:"MEMBER,dash"`
		Buckets  int       `table:"BUCKETS"`
		UDP      uint64    `table:"UDP"`
		TCP      uint64    `table:"TCP"`
		Rejected uint64    `table:"REJECTED"`
		Drops    uint32    `table:"DROPS"`
		Queue    string    `table:"QUEUE,dash"`
	}
	var rows []row
	for _, slot := range s.Slots {
		udp, tcp := slot.Verdicts["udp"], slot.Verdicts["tcp"]
		r := row{Slot: slot.Slot, State: slotText(s, slot), Since: slot.Since, Member: slotMember(slot), Buckets: slot.Buckets,
			UDP: udp.Steered, TCP: tcp.Steered, Rejected: udp.Rejected + tcp.Rejected + udp.Dropped + tcp.Dropped}
		if slot.Admitted() && !slot.Idle {
			r.PID = fmt.Sprint(slot.PID)
		}
		r.Drops, r.Queue = queues(slot.Sockets)
		rows = append(rows, r)
	}
	cli.PrintIndentedRows(w, rows, now)
}

// queues returns the sum of the sockets' drops, and the fill level of each socket's buffer or backlog.
func queues(all []slots.Socket) (drops uint32, text string) {
	var queue []string
	for _, sock := range all {
		drops += sock.Drops
		switch {
		case sock.Buffer > 0:
			queue = append(queue, fmt.Sprintf("%s/%s", cli.Bytes(uint64(sock.Queue)), cli.Bytes(uint64(sock.Buffer))))
		case sock.Backlog > 0:
			queue = append(queue, fmt.Sprintf("%d/%d", sock.Queue, sock.Backlog))
		}
	}
	return drops, strings.Join(queue, " ")
}

// slotMember returns a slot's configured member, or the occupant in its place.
func slotMember(slot slots.State) string {
	if slot.Occupant != "" {
		return slot.Occupant + ", not " + slot.Member
	}
	return slot.Member
}

// printDraining prints the state of the draining generation of a slot.
func printDraining(w io.Writer, slot slots.State, now time.Time) {
	d := slot.Draining
	if d == nil {
		return
	}
	var left []string
	add := func(n int, one, more string) {
		if n == 1 {
			left = append(left, "1 "+one)
		} else if n > 1 {
			left = append(left, fmt.Sprintf("%d %s", n, more))
		}
	}
	add(d.Peers, "UDP peer", "UDP peers")
	add(d.Sessions, "TCP connection", "TCP connections")
	add(d.Waiting, "in its queue", "in its queues")
	add(int(d.Unread), "byte unread", "bytes unread")
	what := strings.Join(left, ", ")
	switch {
	case what == "":
		what = "nothing"
	case d.Until.Before(now):
		what += "; it gets no new traffic"
	default:
		what += ", for " + cli.Ago(now, d.Until) + " more at most"
	}
	cli.Note(w, "  slot %d: process %d drains since %s, left: %s\n", slot.Slot, d.PID, cli.Ago(d.Since, now), what)
	if d.Back > 0 {
		cli.Note(w, "  slot %d: %s returned to it, because its successor is not complete\n", slot.Slot, fmt.Count(d.Back, "packet"))
	}
}

// printCopies prints the service that receives copies of the datagrams.
func printCopies(w io.Writer, c *engine.Copies) {
	if c == nil {
		return
	}
	fmt.Fprintf(w, "  copied to %s: %s", c.To, fmt.Count(c.Copied, "datagram"))
	if c.Fragmented > 0 {
		fmt.Fprintf(w, "; %d not copied: fragmented", c.Fragmented)
	}
	if c.Failed > 0 {
		fmt.Fprintf(w, "; %d not copied: rejected by the kernel", c.Failed)
	}
	fmt.Fprintln(w)
}

// notes returns warnings about a service.
func notes(s state.Service) []string {
	var out []string
	if s.Bypassed {
		out = append(out, fmt.Sprintf("BYPASSED: the kernel alone chooses, no packet is steered: run weir bypass --off %s", s.Name))
	}
	for _, slot := range s.Drained {
		out = append(out, fmt.Sprintf("slot %d is drained: its traffic goes to the other slots: run weir steer undrain %s --slot %d", slot, s.Name, slot))
	}
	if s.MisplacedSessions != nil && *s.MisplacedSessions > 0 {
		out = append(out, fmt.Sprintf("%d TCP sessions are misplaced, not at their router's slot: run weir steer reset %s", *s.MisplacedSessions, s.Name))
	}
	return out
}

func slotText(s state.Service, slot slots.State) string {
	if slices.Contains(s.Drained, slot.Slot) {
		return slot.State + ", drained"
	}
	if slot.Idle {
		return slot.State + ", idle"
	}
	return slot.State
}

// printMoves lists the devices and buckets moved by an operator.
func printMoves(w io.Writer, s state.Service) {
	for _, device := range slices.Sorted(maps.Keys(s.Moved)) {
		cli.Note(w, "  moved: %s to slot %d\n", device, s.Moved[device])
	}
	for _, bucket := range slices.Sorted(maps.Keys(s.Placed)) {
		cli.Note(w, "  moved: bucket %d to slot %d\n", bucket, s.Placed[bucket])
	}
}

// printOutdated lists the programs of another weir version.
func printOutdated(w io.Writer, list []state.Outdated) {
	for _, o := range list {
		cli.Note(w, "engine %s of %s runs the program of another weir version: %s: run weir upgrade\n", o.Engine, o.Netns, o)
	}
}
