//! Draws measurements as SVG plots in colours that are readable on light and on dark pages.

use std::path::Path;

use plotters::prelude::*;

use crate::Outcome;
use crate::findings::Plot;

const SIZE: (u32, u32) = (720, 380);
/// The colours of the lines, which also differ in brightness, for readers who cannot distinguish colours.
const COLOURS: [RGBColor; 3] = [RGBColor(0, 90, 181), RGBColor(220, 110, 0), RGBColor(110, 110, 110)];
const TEXT: RGBColor = RGBColor(40, 40, 40);

/// Draws a plot into an SVG file. The points have equal distances on the x axis, whatever their values; the y axis
/// starts at 0.
pub(crate) fn draw(plot: &Plot, path: &Path) -> Outcome<()> {
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let most = plot.lines.iter().flat_map(|line| &line.values).copied().fold(0.0, f64::max);
    let last = plot.points.len().saturating_sub(1) as f64;
    let text = |size: i32| ("sans-serif", size).into_font().color(&TEXT);
    let mut chart = ChartBuilder::on(&root)
        .caption(&plot.title, text(19))
        .margin(14)
        .x_label_area_size(46)
        .y_label_area_size(62)
        .build_cartesian_2d(-0.25..last + 0.25, 0.0..most * (1.15 + 0.08 * plot.lines.len() as f64))?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .disable_x_axis()
        .light_line_style(TRANSPARENT)
        .bold_line_style(RGBColor(225, 225, 225))
        .axis_style(TEXT)
        .y_desc(&plot.y)
        .y_labels(6)
        .label_style(text(14))
        .y_label_formatter(&|value| if most < 5.0 { format!("{value:.1}") } else { format!("{value:.0}") })
        .draw()?;
    for (line, colour) in plot.lines.iter().zip(COLOURS) {
        let points: Vec<(f64, f64)> = line.values.iter().enumerate().map(|(x, y)| (x as f64, *y)).collect();
        let stroke = colour.stroke_width(2);
        chart
            .draw_series(LineSeries::new(points.clone(), stroke))?
            .label(&line.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(3)));
        chart.draw_series(points.iter().map(|point| Circle::new(*point, 4, colour.filled())))?;
    }
    // The plotting library would also print labels between the points of the x axis, so this function draws the labels
    // itself.
    let (places, bottom) = (chart.plotting_area().clone(), SIZE.1.cast_signed());
    let centred = |size: i32| {
        text(size).pos(plotters::style::text_anchor::Pos::new(
            plotters::style::text_anchor::HPos::Center,
            plotters::style::text_anchor::VPos::Center,
        ))
    };
    for (x, name) in plot.points.iter().enumerate() {
        let (x, _) = places.map_coordinate(&(x as f64, 0.0));
        root.draw(&Text::new(name.clone(), (x, bottom - 48), centred(14)))?;
    }
    let (middle, _) = places.map_coordinate(&(last / 2.0, 0.0));
    root.draw(&Text::new(plot.x.clone(), (middle, bottom - 24), centred(14)))?;
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.85))
        .border_style(RGBColor(200, 200, 200))
        .label_font(text(14))
        .draw()?;
    root.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::findings::Line;

    #[test]
    fn plot_becomes_drawing_with_all_names() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plot.svg");
        let lines = vec![
            Line { name: "ours".into(), values: vec![1.0, 2.0] },
            Line { name: "floor".into(), values: vec![3.0, 4.0] },
        ];
        let (title, x, y) = ("Rate".into(), "hosts".into(), "ADD/s".into());
        draw(&Plot { title, x, y, points: vec!["10".into(), "5,000".into()], lines }, &path).unwrap();
        let drawing = std::fs::read_to_string(path).unwrap();
        for text in ["<svg", "Rate", "hosts", "ADD/s", "5,000", "ours", "floor"] {
            assert!(drawing.contains(text), "{text} is missing");
        }
    }
}
