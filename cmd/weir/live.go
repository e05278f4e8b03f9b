// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/feature/steer"
	"github.com/weir-project/weir/kernel"
)

// resetFlags are those of commands after which sessions may be misplaced.
type resetFlags struct {
	rate steer.Rate
	dry  bool
	cmd  *cobra.Command
}

func (f *resetFlags) addRate(c *cobra.Command) {
	f.cmd = c
	c.Flags().Var(&f.rate, "rate", "how fast to reset sessions that are at another slot than their router, like 5/s; 0 leaves them\n(default: the service's reset_rate)")
	c.Flags().Lookup("rate").DefValue = ""
}

func (f *resetFlags) add(c *cobra.Command) {
	f.addRate(c)
	c.Flags().BoolVar(&f.dry, "dry-run", false, "list the routers whose sessions would be reset, change nothing")
}

// given is the rate if the command line has one.
func (f *resetFlags) given() *steer.Rate {
	if !f.cmd.Flags().Changed("rate") {
		return nil
	}
	return &f.rate
}

// resetDue resets what a change has misplaced, and tells of each session.
func (f *resetFlags) resetDue(g *globals) error {
	if r := f.given(); r != nil && *r == 0 {
		return nil
	}
	return steer.ResetDue(f.cmd.Context(), g.host().Root, f.given(), func(r steer.Reset) { printReset(f.cmd.OutOrStdout(), r) })
}

func printReset(w io.Writer, r steer.Reset) {
	if r.Err != nil {
		fmt.Fprintf(w, "session of %s is misplaced (%s of %s): %v\n", r.Router(), r.Place(), r.Service, r.Err)
		return
	}
	fmt.Fprintf(w, "reset session of %s: %s of %s (%d of %d)\n", r.Router(), r.Place(), r.Service, r.Done, r.Of)
}

func printForeseen(w io.Writer, all ...steer.Foreseen) {
	for _, f := range all {
		for _, s := range f.Sessions {
			fmt.Fprintf(w, "would reset session of %s: %s of %s\n", s.Router(), s.Place(), f.Service)
		}
		if f.Problem != "" {
			fmt.Fprintf(w, "cannot say which sessions of %s would be reset: %s\n", f.Service, f.Problem)
		}
	}
}

// pinned is a service as its pins have it.
func pinned(cmd *cobra.Command, g *globals, name string) (*steer.ServiceState, error) {
	st, err := steer.ReadState(cmd.Context(), g.host().Root)
	if err != nil {
		return nil, err
	}
	return st.Service(name)
}

// locked runs f with the lock.
func locked(cmd *cobra.Command, g *globals, f func(l *kernel.WriteLock) error) error {
	l, err := g.host().Root.Lock(cmd.Context())
	if err != nil {
		return err
	}
	defer l.Unlock()
	return f(l)
}

func steerMove(g *globals) *cobra.Command {
	var m steer.Moving
	var resets resetFlags
	c := &cobra.Command{
		Use: "move SERVICE {--device ADDRESS | --bucket N} {--to SLOT | --back}", Short: "Put one device or bucket into another slot, or back", Args: cobra.ExactArgs(1),
		Long: `Put one device, or one of the 4096 buckets, into another slot, for every protocol
at once, or back to where it is otherwise. It stays there over weir apply.
The router's TCP sessions at the former slot are reset, so that it is not split.`,
		Example: `  weir steer move telemetry --device 192.0.2.7 --to 2
  weir steer move telemetry --device edge1.fra --back
  weir steer move telemetry --bucket 1234 --to 0 --dry-run`,
		RunE: func(cmd *cobra.Command, args []string) error {
			flags := cmd.Flags()
			if flags.Changed("device") == flags.Changed("bucket") || m.Device == "" && flags.Changed("device") {
				return usageError{errors.New("name what to move: --device ADDRESS, or --bucket N")}
			}
			if flags.Changed("to") == m.Back {
				return usageError{errors.New("say where to: --to SLOT, or --back")}
			}
			s, err := pinned(cmd, g, args[0])
			if err != nil {
				return err
			}
			if resets.dry {
				f, err := steer.ForeseeMove(cmd.Context(), g.host().Root, s, m)
				printForeseen(cmd.OutOrStdout(), f)
				return err
			}
			err = locked(cmd, g, func(l *kernel.WriteLock) error { return steer.Move(l, s.Scope(), s.Name, m, resets.given()) })
			if err != nil {
				return err
			}
			return resets.resetDue(g)
		},
	}
	c.Flags().StringVar(&m.Device, "device", "", "source address, or name of a device")
	c.Flags().IntVar(&m.Bucket, "bucket", 0, "number of a bucket, 0 to 4095")
	c.Flags().IntVar(&m.To, "to", 0, "number of the slot")
	c.Flags().BoolVar(&m.Back, "back", false, "to where it is when it is not moved")
	resets.add(c)
	return c
}

func steerDrain(g *globals) *cobra.Command {
	return drainCommand(g, false, &cobra.Command{
		Use: "drain SERVICE --slot N", Short: "Give a slot's traffic to the others until it is undrained",
		Long: `Give a slot's traffic to the other slots, as if its weight were 0, until weir steer
undrain. Its member stays. It stays drained over weir apply. TCP sessions that it
holds are reset, paced, and come back at the slot that has their router then.`,
		Example: `  weir steer drain telemetry --slot 3 --dry-run   # lists the routers
  weir steer drain telemetry --slot 3 --rate 20/s`,
	})
}

func steerUndrain(g *globals) *cobra.Command {
	return drainCommand(g, true, &cobra.Command{
		Use: "undrain SERVICE --slot N", Short: "Give a drained slot its traffic back",
		Example: `  weir steer undrain telemetry --slot 3`,
	})
}

func drainCommand(g *globals, back bool, c *cobra.Command) *cobra.Command {
	slot := -1
	var resets resetFlags
	c.Args = cobra.ExactArgs(1)
	c.RunE = func(cmd *cobra.Command, args []string) error {
		named, err := slotOf(cmd, g, args[0], slot)
		if err != nil {
			return err
		}
		if resets.dry {
			s, err := pinned(cmd, g, args[0])
			if err != nil {
				return err
			}
			f, err := steer.ForeseeDrain(cmd.Context(), g.host().Root, s, slot, back)
			printForeseen(cmd.OutOrStdout(), f)
			return err
		}
		err = locked(cmd, g, func(l *kernel.WriteLock) error {
			if back {
				return steer.Undrain(l, named, resets.given())
			}
			return steer.Drain(l, named, resets.given())
		})
		if err != nil {
			return err
		}
		return resets.resetDue(g)
	}
	c.Flags().IntVar(&slot, "slot", -1, "number of the slot")
	resets.add(c)
	return c
}

func steerReset(g *globals) *cobra.Command {
	var resets resetFlags
	c := &cobra.Command{
		Use: "reset SERVICE", Short: "Reset the TCP sessions that are at another slot than their router", Args: cobra.ExactArgs(1),
		Long: `Reset the TCP sessions that are held by another slot's member than the one that
has the router's traffic now. Changes do so by themselves; this is for what was
left with --rate 0.`,
		Example: `  weir steer reset telemetry --dry-run
  weir steer reset telemetry --rate 20/s`,
		RunE: func(cmd *cobra.Command, args []string) error {
			s, err := pinned(cmd, g, args[0])
			if err != nil {
				return err
			}
			if resets.dry {
				found, err := s.Misplaced(cmd.Context())
				f := steer.Foreseen{Service: s.Name, Sessions: append([]steer.Session{}, found...)}
				if g.json && err == nil {
					return printJSON(cmd, f)
				}
				printForeseen(cmd.OutOrStdout(), f)
				return err
			}
			rate := steer.DefaultResetRate
			if given := resets.given(); given != nil {
				if rate = *given; rate == 0 {
					return usageError{errors.New("--rate 0 resets none: give a rate like 5/s")}
				}
			} else if own := s.ResetRate(); own != 0 {
				rate = own
			}
			return steer.ResetService(cmd.Context(), g.host().Root, s.Scope(), s.Name, rate,
				func(r steer.Reset) { printReset(cmd.OutOrStdout(), r) })
		},
	}
	resets.add(c)
	jsonFlag(c, g)
	c.Flags().Lookup("json").Usage = "print JSON, with --dry-run"
	return c
}

func bypassCommand(g *globals) *cobra.Command {
	off := false
	c := &cobra.Command{
		Use: "bypass SERVICE", Short: "Leave a service's traffic to the kernel at once; --off steers it again", Args: cobra.ExactArgs(1),
		Long: `Leave a service's traffic to the kernel at once, as if weir were not there: no
packet of it is steered, rejected or counted. The service stays as it is, also
over weir apply, until --off. For the hour when you want weir out of the picture.`,
		Example: `  weir bypass telemetry
  weir bypass --off telemetry`,
		RunE: func(cmd *cobra.Command, args []string) error {
			s, err := pinned(cmd, g, args[0])
			if err != nil {
				return err
			}
			did := false
			err = locked(cmd, g, func(l *kernel.WriteLock) (err error) {
				did, err = steer.Bypass(l, s.Scope(), s.Name, !off)
				return err
			})
			if err != nil {
				return err
			}
			out := cmd.OutOrStdout()
			switch {
			case !did && off:
				fmt.Fprintf(out, "%s is not bypassed\n", s.Name)
			case !did:
				fmt.Fprintf(out, "%s is bypassed already\n", s.Name)
			case off:
				fmt.Fprintf(out, "%s is steered again\n", s.Name)
				return steer.ResetDue(cmd.Context(), g.host().Root, nil, func(r steer.Reset) { printReset(out, r) })
			default:
				fmt.Fprintf(out, "%s is bypassed: the kernel alone chooses, until weir bypass --off %s\n", s.Name, s.Name)
			}
			return nil
		},
	}
	c.Flags().BoolVar(&off, "off", false, "steer it again")
	return c
}
